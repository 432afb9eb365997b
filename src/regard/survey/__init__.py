"""What every head of a model does, over a corpus: sums of any size, on any number of machines.

docs/survey.md has the statistics, the files, and recipes for Ray, Dask and Slurm.
"""

from regard.survey._corpus import SurveyError
from regard.survey._run import Progress
from regard.survey._shard import Facts
from regard.survey._sums import HeadSums, TopReceiver
from regard.survey._survey import Survey

__all__ = ["Facts", "HeadSums", "Progress", "Survey", "SurveyError", "TopReceiver"]
