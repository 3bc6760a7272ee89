"""Images that a request brings along. None is fetched: a URL in a request could name what only this machine sees."""

from __future__ import annotations

import base64
import io
from importlib.util import find_spec
from typing import Any

from lade.hf.media import IMAGE_FORMATS
from lade.server.errors import ApiError, invalid, unsupported
from lade.server.settings import MOST_IMAGES, MOST_PIXELS

_FORMATS = f"{', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"


class Images:
    """The images of one request, which are bounded together: a few kilobytes can be a picture of gigabytes."""

    def __init__(self) -> None:
        self._count = self._pixels = 0

    def read(self, url: str, place: str) -> Any:
        """A picture in memory, in RGB, of a `data:` URL.

        Args:
            url: such as `data:image/png;base64,iVBOR...`.
            place: of the field, for messages.

        Raises:
            ApiError: it is elsewhere, no image, too large, one too many, or Pillow is missing.
        """
        head, comma, data = url.partition(",")
        if not head.startswith("data:") or not comma or not head.endswith(";base64"):
            raise unsupported(place, "images are not fetched: send them as  data:image/png;base64,...")
        if find_spec("PIL") is None:
            raise unsupported(place, "this server cannot read images: it needs Pillow (pip install pillow)")
        from PIL import Image as pillow

        self._count += 1
        if self._count > MOST_IMAGES:
            raise invalid(place, f"there are more than {MOST_IMAGES} images: send fewer")
        try:
            with pillow.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=IMAGE_FORMATS) as picture:
                self._pixels += picture.width * picture.height
                if self._pixels > MOST_PIXELS:
                    raise invalid(place, f"the images have more than {MOST_PIXELS} pixels together: send smaller ones")
                return picture.convert("RGB")
        except ApiError:
            raise
        except Exception as problem:  # noqa: BLE001 - whatever a decoder makes of what a client has sent
            why = f"no image can be read from it ({type(problem).__name__}): send a {_FORMATS}"
            raise invalid(place, why) from None
