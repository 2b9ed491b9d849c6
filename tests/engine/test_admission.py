"""What the worker takes: a number of requests, and the images that wait for the encoder."""

from engine.admission import MAX_WAITING_PIXEL_BYTES, Admission


def test_images_of_any_size_are_admitted_alone_and_keep_out_no_request_without_images():
    admission = Admission(limit=4)
    assert admission.admit(1, MAX_WAITING_PIXEL_BYTES + 1) is None
    assert admission.admit(1, 1) == "overloaded"
    assert admission.admit(1, 0) is None
    admission.release_pixels(MAX_WAITING_PIXEL_BYTES + 1)
    assert admission.admit(1, 1) is None
