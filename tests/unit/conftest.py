"""Property tests give the same verdict on every machine: same examples, no time limit of their own."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
