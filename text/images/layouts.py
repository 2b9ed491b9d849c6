"""How the images of each vision-language family become tiles for its vision tower, and the text that stands
for them in a prompt.

An image layout is a class, which rows of VISION_FAMILIES (manifest.py) name. The tiles equal those of
transformers' image processors for Pillow to the byte. Layouts call methods of Pillow's images, but this file
does not import Pillow: API server processes import it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from manifest import Manifest, whole
from run import ConfigError, Json

if TYPE_CHECKING:
    from PIL.Image import Image

SOURCES = "preprocessor_config.json or --mm-processor-kwargs"
BICUBIC = 3  # the number of a resampling filter in preprocessor files
# Fields of Qwen's models; files of transformers 4 have the last two.
SIZE_FIELDS = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}


class Tiles(NamedTuple):
    """An image as the model reads it."""

    tiles: list[Image]  # RGB, all of one size
    text: str  # what stands in the prompt in the place of the placeholder, with all image tokens
    # With `AnyResolution`: rows and columns of the grid of patches, the rows of padding above and below, the
    # columns on the left and right, and the rows and columns that the rest is scaled down to, often its own.
    # With `PixelBounds`: rows and columns of tokens.
    canvas: tuple[int, ...] = ()


class Facts(dict):
    """The fields of a model's preprocessor files and configuration."""

    def number(self, name: str, default: int | None = None) -> int:
        """Returns the field as a positive whole number; `default` where the field is missing or null. Raises
        ConfigError for another value, and for a missing field without a default.

        An object stands for a number if all its values but nulls are that number: {"height": 384, "width":
        384}.
        """
        value = self.get(name)
        if isinstance(value, dict):
            edges = [edge for edge in value.values() if edge is not None]
            if edges and edges.count(edges[0]) == len(edges):
                value = edges[0]
        number = default if value is None else whole(value)
        if number is None or number < 1:
            example = f'a positive whole number, or an object such as {{"longest_edge": {default or 1024}}}'
            raise ConfigError(f"{SOURCES}: `{name}` must be {example}; given: {repr(value)[:100]}")
        return number

    def tile_side(self, name: str) -> int:
        """Returns the field as the side of a tile. Raises ConfigError as `number` does, and for a side that
        the vision tower does not read."""
        side = self.number(name)
        expected = self.get("image_size") or side
        if side != expected:
            tower = f"{expected}, the `image_size` of `vision_config` in config.json"
            raise ConfigError(f"{SOURCES}: `{name}` must be {tower}; given: {side}")
        return side


class Layout:
    """What all layouts share: a call turns an image into `Tiles`. The constructor raises ConfigError if a
    field that the layout needs is missing or not valid. It may change the facts that it gets."""

    image_token = "<image>"
    placeholder = ""  # what the chat template writes for an image, if not the image token
    resample = BICUBIC
    options: ClassVar[tuple[str, ...]] = ()  # the fields that --mm-processor-kwargs may set
    one_tile: ClassVar[Json] = {}  # values of these for `detail: "low"`: one small tile
    always: ClassVar[tuple[str, ...]] = ("do_resize",)  # fields that must be true, as they are by default

    def __init__(self, facts: Facts):
        for name in self.always:
            if not facts.get(name, True):
                raise ConfigError(f"{SOURCES}: `{name}` must be true; given: {facts[name]!r}")
        self.token = str(facts.get("image_token") or self.image_token)
        self._filter = facts.number("resample", self.resample)

    def __call__(self, image: Image) -> Tiles:
        """Returns the tiles of an image, and the text that stands for it. image: RGB, upright, of any size;
        it is not changed."""
        raise NotImplementedError

    def bounds(self, tokens: int) -> Json:
        """Returns the options with which no image has more than `tokens` tokens, unless `min_pixels` asks for
        more. {}: no image has more as the options are, or the layout has no such options."""
        return {}

    def _resized(self, image: Image, width: int, height: int) -> Image:
        return image if image.size == (width, height) else image.resize((width, height), self._filter)


class Square(Layout):
    """LLaVA with SigLIP: the image is one tile, whatever its form."""

    side = "size"  # the field that has the side of the tile
    class_tokens = 0  # outputs of the tower that are no patches

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self._side = facts.tile_side(self.side)
        # Without a class token it is the first patch that is left out.
        drops_first = facts.get("vision_feature_select_strategy") == "default"
        self._tokens = (self._side // facts.number("patch_size")) ** 2 + self.class_tokens - drops_first

    def __call__(self, image: Image) -> Tiles:
        return Tiles([self._tile(image)], self.token * self._tokens)

    def _tile(self, image: Image) -> Image:
        return self._resized(image, self._side, self._side)


class CenterCrop(Square):
    """LLaVA-1.5: one tile out of the middle of the image, whose short side is scaled to `size`; if `size` has
    a height, both sides are, and the tile may be all of it (`do_center_crop` is false)."""

    side = "crop_size"
    class_tokens = 1
    always = ("do_resize", "do_center_crop")

    def __init__(self, facts: Facts):
        size = facts.get("size")
        self._is_squared = isinstance(size, dict) and size.get("height") is not None
        if self._is_squared and not facts.get("do_center_crop", True):
            facts |= {"crop_size": size, "do_center_crop": True}
        super().__init__(facts)
        self._edge = facts.number("size")

    def _tile(self, image: Image) -> Image:
        sides = (1, 1) if self._is_squared else image.size
        width, height = (self._edge * side // min(sides) for side in sides)
        left = (width - self._side) // 2
        top = (height - self._side) // 2
        return self._resized(image, width, height).crop((left, top, left + self._side, top + self._side))


class AnyResolution(Layout):
    """LLaVA-NeXT, Granite Vision, LLaVA-OneVision: the whole image as one tile, then the tiles of the canvas
    that fits the image best."""

    options = ("image_grid_pinpoints",)
    always = ()  # transformers, too, scales to the canvas in any case

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self._side = facts.tile_side("size")
        self._patches = self._side // facts.number("patch_size")  # along a side of a tile
        self._canvases = _canvas_sizes(facts.get("image_grid_pinpoints"), self._side)
        # A larger grid of patches is scaled down: "anyres_max_9" allows as many as nine tiles have.
        limit = re.fullmatch(r"anyres_max_(\d+)", str(facts.get("vision_aspect_ratio")))
        self._max_patches = int(limit[1]) * self._patches**2 if limit else math.inf

    def __call__(self, image: Image) -> Tiles:
        height, width = self._best_canvas(image)
        scale = min(width / image.width, height / image.height)
        new_width, new_height = (
            min(math.ceil(edge * scale), most) for edge, most in zip(image.size, (width, height))
        )
        left = (width - new_width) // 2
        top = (height - new_height) // 2
        # What is outside of the image is black.
        canvas = self._resized(image, new_width, new_height).crop((-left, -top, width - left, height - top))
        tiles = [self._resized(image, self._side, self._side), *_cut(canvas, self._side)]
        *_, rows, columns = packing = self._packing(image, height, width)
        tokens = self._patches**2 + rows * (columns + 1)  # each row ends with a newline's embedding
        return Tiles(tiles, self.token * tokens, packing)

    def _best_canvas(self, image: Image) -> tuple[int, int]:
        """Returns height and width, in pixels, of the canvas that keeps most of the image's pixels; of equal
        ones the smallest."""

        def fit(size: tuple[int, int]) -> tuple[int, int]:
            height, width = size
            scale = min(width / image.width, height / image.height)
            scaled = int(image.width * scale) * int(image.height * scale)
            kept = min(scaled, image.width * image.height)
            return kept, -width * height

        return max(self._canvases, key=fit)

    def _packing(self, image: Image, height: int, width: int) -> tuple[int, ...]:
        """Returns `Tiles.canvas` of an image. height, width: of its canvas, in pixels. The last two numbers
        are the rows and columns of patches without padding; both are scaled down if these are more than 1.21
        times `_max_patches` patches. The rounding is that of transformers' models."""
        rows = self._patches * (height // self._side)
        columns = self._patches * (width // self._side)
        scale = min(columns / image.width, rows / image.height)
        above = (rows - int(round(image.height * scale, 7))) // 2
        left = (columns - int(round(image.width * scale, 7))) // 2
        kept = [rows - 2 * above, columns - 2 * left]
        ratio = math.sqrt(math.prod(kept) / self._max_patches)
        if ratio > 1.1:
            kept = [int(edge // ratio) for edge in kept]
        return (rows, columns, above, left, *kept)


class RowsAndColumns(Layout):
    """Idefics3, SmolVLM: tiles of the image, each with the name of its place, then the whole image. The long
    side is first scaled to `size`, also up. An image of one tile is only the whole image."""

    resample = 1  # Lanczos
    options = ("size", "do_image_splitting")
    one_tile: ClassVar = {"do_image_splitting": False}

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self._longest = facts.number("size")
        self._side = facts.tile_side("max_image_size")
        is_split = facts.get("do_image_splitting")
        if not (is_split is None or isinstance(is_split, bool)):
            given = repr(is_split)[:100]
            raise ConfigError(f"{SOURCES}: `do_image_splitting` must be true or false; given: {given}")
        self._is_split = is_split is not False
        self._tokens = facts.number("image_seq_len", 169)

    def __call__(self, image: Image) -> Tiles:
        width, height = _scaled_size(image, self._longest)
        image = self._resized(image, max(width + width % 2, 1), max(height + height % 2, 1))
        columns = rows = 1
        if self._is_split:
            longest = math.ceil(max(image.size) / self._side) * self._side
            columns, rows = (math.ceil(edge / self._side) for edge in _scaled_size(image, longest))
            image = self._resized(image, columns * self._side, rows * self._side)
        tiles = []
        text = ""
        if columns * rows > 1:
            tiles = _cut(image, self._side)
            for row in range(1, rows + 1):
                names = (f"row_{row}_col_{column}" for column in range(1, columns + 1))
                text += "".join(map(self._tile, names)) + "\n"
            text += "\n"
        tiles.append(self._resized(image, self._side, self._side))
        return Tiles(tiles, text + self._tile("global-img") + "<fake_token_around_image>")

    def _tile(self, name: str) -> str:
        return f"<fake_token_around_image><{name}>{self.token * self._tokens}"


class Blocks(Layout):
    """LightOnOCR: one tile in the form of the image, of whole patches. The last patches make no token if they
    do not fill one."""

    image_token = "<|image_pad|>"
    options = ("size",)

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self._longest = facts.number("size")
        self._patch = facts.number("patch_size")
        self._merge = facts.number("spatial_merge_size", 2)  # patches along a side of a token

    def __call__(self, image: Image) -> Tiles:
        ratio = max(1, image.height / self._longest, image.width / self._longest)
        # At least a token, also for an icon of which transformers would make none.
        rows, columns = (
            max(math.ceil(int(edge / ratio) / self._patch), self._merge)
            for edge in (image.height, image.width)
        )
        tile = self._resized(image, columns * self._patch, rows * self._patch)
        return Tiles([tile], self._text(rows // self._merge, columns // self._merge))

    def _text(self, rows: int, columns: int) -> str:
        return self.token * rows * columns


class Lines(Blocks):
    """Pixtral, Mistral Small 3: as `Blocks`, but of whole tokens. A break token stands between rows of
    tokens, and an end token after the last row."""

    image_token = "[IMG]"

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self._patch *= facts.number("spatial_merge_size", 1)
        self._merge = 1
        self._break = str(facts.get("image_break_token") or "[IMG_BREAK]")
        self._end = str(facts.get("image_end_token") or "[IMG_END]")

    def _text(self, rows: int, columns: int) -> str:
        return self._break.join([self.token * columns] * rows) + self._end


class Grid(Layout):
    """InternVL: the tiles of a grid, and then the whole image if the grid has several. The grid has
    `min_patches` to `max_patches` tiles, and the form that is nearest to that of the image."""

    image_token = "<IMG_CONTEXT>"
    options = ("min_patches", "max_patches")
    one_tile: ClassVar = {"min_patches": 1, "max_patches": 1}
    most = 12  # tiles, where no file says it
    begin = "<img>"
    end = "</img>"

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self._side = facts.tile_side("size")
        least = facts.number("min_patches", 1)
        most = facts.number("max_patches", self.most)
        if least > most:
            given = f"`min_patches` {least} is more than `max_patches` {most}"
            raise ConfigError(f"{SOURCES}: {given}, so no grid of tiles is left")
        self._tokens = facts.number("image_seq_length", 256)
        edges = range(1, most + 1)
        grids = [(columns, rows) for columns in edges for rows in edges if least <= columns * rows <= most]
        self._grids = sorted(grids, key=math.prod)  # the order decides between equally near ones

    def __call__(self, image: Image) -> Tiles:
        columns, rows = self._nearest(image)
        tiles = _cut(self._resized(image, columns * self._side, rows * self._side), self._side)
        if len(tiles) > 1:
            tiles.append(self._resized(image, self._side, self._side))
        return Tiles(tiles, self.begin + self.token * self._tokens * len(tiles) + self.end)

    def _nearest(self, image: Image) -> tuple[int, int]:
        """Returns columns and rows, in tiles, of the grid whose form is nearest to that of the image. Of
        equally near grids, the largest counts that has fewer than twice the pixels of the image, else the
        smallest."""
        best = (1, 1)
        least = math.inf
        for columns, rows in self._grids:
            difference = abs(image.width / image.height - columns / rows)
            is_filled = image.width * image.height > 0.5 * self._side**2 * columns * rows
            if difference < least or (difference == least and is_filled):
                best = (columns, rows)
                least = difference
        return best


class Pooled(Grid):
    """Gemma 3: the image is one tile, whatever its form, of which always as many tokens remain."""

    image_token = "<image_soft_token>"
    placeholder = "<start_of_image>"
    resample = 2  # bilinear
    options = ()
    one_tile: ClassVar = {}
    most = 1
    begin = "\n\n<start_of_image>"
    end = "<end_of_image>\n\n"


class PixelBounds(Layout):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5: one tile in the form of the image, of whole tokens.

    The tile has as many pixels as the image, but no fewer than `min_pixels` and no more than `max_pixels`.
    Where they are missing, the bounds in `size` count.
    """

    image_token = "<|image_pad|>"
    options = ("size", "min_pixels", "max_pixels")
    one_tile: ClassVar = {"max_pixels": 512 * 512}
    least = 56 * 56  # pixels, where no file says it
    most = 28 * 28 * 1280

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self._frames = 1  # how often the bounds count a pixel
        self._side = facts.number("patch_size") * facts.number("merge_size", 2)
        edges = facts.get("size") or {}
        if not isinstance(edges, dict) or (edges and not edges.keys() & SIZE_FIELDS):
            example = 'an object such as {"shortest_edge": 3136, "longest_edge": 1003520} (pixels)'
            raise ConfigError(f"{SOURCES}: `size` must be {example}; given: {repr(edges)[:100]}")
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if facts.get(name) is None:
                facts[name] = edges.get(edge, edges.get(name))
        self._most = facts.number("max_pixels", self.most)
        self._least = min(facts.number("min_pixels", self.least), self._most)

    def bounds(self, tokens: int) -> Json:
        most = max(tokens * self._frames * self._side**2, self._least)
        return {"max_pixels": most} if most < self._most else {}

    def __call__(self, image: Image) -> Tiles:
        edges = self._edges(image)
        rows, columns = (round(edge / self._side) for edge in edges)
        pixels = self._frames * rows * columns * self._side**2
        if pixels > self._most:
            scale = math.sqrt(self._frames * math.prod(edges) / self._most)
            rows, columns = (max(1, math.floor(edge / scale / self._side)) for edge in edges)
        elif pixels < self._least:
            scale = math.sqrt(self._least / (self._frames * math.prod(edges)))
            rows, columns = (math.ceil(edge * scale / self._side) for edge in edges)
        tile = self._resized(image, columns * self._side, rows * self._side)
        return Tiles([tile], self.token * rows * columns, (rows, columns))

    def _edges(self, image: Image) -> tuple[int, int]:
        """Returns the height and width, in pixels, from which the size of the tile is computed: here those of
        the image."""
        return image.height, image.width


class FrameBounds(PixelBounds):
    """GLM-OCR: as `PixelBounds`, but the bounds count each pixel once for each of the frames of a patch. An
    image with a side that is shorter than a token's is first scaled up."""

    image_token = "<|image|>"
    one_tile: ClassVar = {"max_pixels": 2 * 512 * 512}
    least = 112 * 112
    most = 28 * 28 * 15_000

    def __init__(self, facts: Facts):
        super().__init__(facts)
        self._frames = facts.number("temporal_patch_size", 2)

    def _edges(self, image: Image) -> tuple[int, int]:
        scale = max(1, self._side / image.height, self._side / image.width)
        return int(image.height * scale), int(image.width * scale)


class UpscaledBounds(PixelBounds):
    """PaddleOCR-VL: as `PixelBounds`. An image with a side that is shorter than a token's is first scaled
    up."""

    image_token = "<|IMAGE_PLACEHOLDER|>"
    least = 384 * 384
    most = 1536 * 1536

    def _edges(self, image: Image) -> tuple[int, int]:
        height, width = image.height, image.width
        if height < self._side:
            height, width = self._side, round(width * self._side / height)
        if width < self._side:
            height, width = round(height * self._side / width), self._side
        return height, width


def read_layout(manifest: Manifest, *overrides: Json) -> Layout:
    """Returns the layout of a model that reads images. Raises ConfigError for a field that the layout needs
    and that is missing or not valid, and for an override that is no option of the layout.

    Of a field in several places, the last of these counts: the defaults of the family, `vision_config`,
    config.json, the processor's files, and each of `overrides` in their order. An override of `size` also
    takes the place of `min_pixels` and `max_pixels` in earlier ones of these places. `image_size` is always
    that of `vision_config`.
    """
    layout = globals()[manifest.layout]
    config = manifest.vision_family.defaults | manifest.vision_config | manifest.config_json
    facts = Facts(config | manifest.processor_config)
    facts["image_size"] = manifest.vision_config.get("image_size")
    for fields in overrides:
        if unknown := fields.keys() - layout.options:
            supported = f"the fields that this model supports: {', '.join(layout.options) or 'none'}"
            raise ConfigError(f"--mm-processor-kwargs (MM_PROCESSOR_KWARGS): {min(unknown)}; {supported}")
        if "size" in fields:  # also in the place of these fields of older files
            facts |= {"min_pixels": None, "max_pixels": None}
        facts |= fields
    return layout(facts)


def _cut(image: Image, side: int) -> list[Image]:
    """Returns the square tiles of an image, row by row. side: of a tile, in pixels; it divides both sides of
    the image."""
    corners = [(x, y) for y in range(0, image.height, side) for x in range(0, image.width, side)]
    return [image.crop((x, y, x + side, y + side)) for x, y in corners]


def _scaled_size(image: Image, longest: int) -> tuple[int, int]:
    """Returns width and height, in pixels, of the image scaled to a long side of `longest` and rounded down:
    0 for the short side of a very long image."""
    ratio = image.width / image.height
    return int(longest * min(1, ratio)), int(longest / max(1, ratio))


def _canvas_sizes(given: Any, side: int) -> list[tuple[int, int]]:
    """Returns the pairs of height and width, in pixels, of `image_grid_pinpoints`, in its order. Raises
    ConfigError unless `given` is a list of one or more pairs of positive whole multiples of `side`."""
    try:
        sizes = [(whole(height), whole(width)) for height, width in given]
    except (TypeError, ValueError):
        sizes = []
    if not sizes or any(not edge or edge < 0 or edge % side for size in sizes for edge in size):
        detail = f"must be a list of pairs [height, width] of multiples of {side}"
        raise ConfigError(f"{SOURCES}: `image_grid_pinpoints` {detail}")
    return sizes
