"""The attention of any torch model: recorded layer by layer, or computed by regard."""

from regard._base.extras import needed_by

with needed_by("regard.record"):
    from regard.capture._calls import mask_or_bias
    from regard.capture._record import Recorded, record

__all__ = ["Recorded", "mask_or_bias", "record"]
