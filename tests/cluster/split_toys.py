"""Small models in folders, loaded whole or split over the processes of a job."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

sys.path.append(str(Path(__file__).parent.parent / "parity"))

from families import family


def saved(kind, folder, **fields):
    """The folder of a model of this family; `fields` of its configuration may be given."""
    place = folder / "-".join([kind, *map(str, fields.values())])
    if not place.exists():
        family(kind).build(**fields).save_pretrained(place)
    return place


def whole(place):
    return AutoModelForCausalLM.from_pretrained(place).eval()


def split(place, size):
    """In each of `size` processes its part."""
    return AutoModelForCausalLM.from_pretrained(
        place, distributed_config=DistributedConfig(tp_plan="auto", tp_size=size)
    ).eval()
