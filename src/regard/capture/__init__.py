"""The attention of any torch model: recorded layer by layer, or watched while it trains."""

from regard._base.extras import needed_by

with needed_by("regard.record and regard.watch"):
    from regard.capture._calls import mask_or_bias
    from regard.capture._measured import NonFinite
    from regard.capture._record import Recorded, record
    from regard.capture._report import WatchReport
    from regard.capture._watch import Watch, watch

__all__ = ["NonFinite", "Recorded", "Watch", "WatchReport", "mask_or_bias", "record", "watch"]
