"""Property tests draw the same cases on every machine, and a busy machine is not a failure."""

from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
