"""The equivalence harness: a parallel implementation against the truth in one process, and its awkward models."""

from labkit.verify.awkward import CASES as CASES
from labkit.verify.awkward import Case as Case
from labkit.verify.equivalence import Equivalence as Equivalence
from labkit.verify.equivalence import NotEquivalentError as NotEquivalentError
from labkit.verify.equivalence import assert_equivalent as assert_equivalent
