"""Images that a request brings along. None is fetched: a URL in a request could name what only this machine sees."""

from __future__ import annotations

import base64
import binascii
import io
from importlib.util import find_spec
from typing import Any

from lade.server.errors import invalid, unsupported

_MOST_PIXELS = 32 * 2**20


def read_image(url: str, place: str) -> Any:
    """A picture in memory, in RGB, of a `data:` URL.

    Args:
        url: such as `data:image/png;base64,iVBOR...`.
        place: of the field, for messages.

    Raises:
        ApiError: it is elsewhere, no image, too large, or Pillow is missing.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise unsupported(place, "images are not fetched: send them as  data:image/png;base64,...")
    if find_spec("PIL") is None:
        raise unsupported(place, "this server cannot read images: it needs Pillow (pip install pillow)")
    from PIL import Image as pillow

    try:
        with pillow.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
            if picture.width * picture.height > _MOST_PIXELS:
                raise invalid(place, f"the image has more than {_MOST_PIXELS} pixels: send a smaller one")
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, binascii.Error, pillow.DecompressionBombError) as problem:
        raise invalid(place, f"no image can be read from it ({type(problem).__name__}): send a PNG or JPEG") from None
