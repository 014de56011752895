"""For whoever adds to featsync: contracts as checks, and ranks without processes."""

from featsync.testing.local_ranks import local_engines, local_tables
from featsync.testing.transport_checks import check_transport

__all__ = ["check_transport", "local_engines", "local_tables"]
