"""The advisor: what attention costs in a model (`profile`), and a policy for it (`advise`)."""

from ._advice import Advice, Tried
from ._advise import advise
from ._profile import profile
from ._profiled import Profile

__all__ = ["Advice", "Profile", "Tried", "advise", "profile"]
