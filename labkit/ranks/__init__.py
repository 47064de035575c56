"""Rank processes from a notebook or a script: start them, run functions and cells on them, bring back results."""

from labkit.ranks.errors import RankError as RankError
from labkit.ranks.pool import Ranks as Ranks
from labkit.ranks.pool import launch as launch
