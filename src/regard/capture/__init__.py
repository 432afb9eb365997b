"""The attention of any torch model: recorded layer by layer, or computed by regard."""

from regard._base.extras import needed_by

with needed_by("regard.record"):
    from regard.capture._record import Recorded, mask_or_bias, record, watched

__all__ = ["Recorded", "mask_or_bias", "record", "watched"]
