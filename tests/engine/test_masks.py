"""A mask that cannot be computed ends one request."""

from engine.masks import masks_of


class Broken:
    """A matcher whose mask cannot be computed."""

    def fill(self, address, size):
        raise RuntimeError("on purpose")


def test_a_mask_that_cannot_be_computed_is_the_error_of_its_row_alone():
    found = masks_of([None, Broken()], 40)
    assert list(found.errors) == [1] and (found.mask == 0xFFFFFFFF).all() and found.mask.shape == (2, 2)
