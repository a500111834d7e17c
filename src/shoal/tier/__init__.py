"""Tiers hold state at rest: a store allocates spans, and a span is fetched before its use and committed after it.

    device, host   spans are always resident: fetch and commit cost nothing
    disk           a span's memory keeps its address; fetch reads its pages from a file, commit writes and releases them

`Store` and `Span` hide the tier from all callers.
"""

from shoal.tier.device_mirror import DeviceMirror, mirrored
from shoal.tier.disk_span import DiskSpan
from shoal.tier.elastic import Elastic, elastic
from shoal.tier.pages import Pages, pageable, storage_use_count, trim, zeros
from shoal.tier.span import (
    FetchOnce,
    JoinedTransfers,
    ResidencyPin,
    ResidentSpan,
    Span,
    SubSpan,
    Transfer,
    fetched,
    offset_names,
)
from shoal.tier.store import Disk, Memory, StoragePlan, Store, Tiers
from shoal.tier.swap import Swap
from shoal.tier.trace import Event, Lanes, Trace

__all__ = [
    "DeviceMirror",
    "Disk",
    "DiskSpan",
    "Elastic",
    "Event",
    "FetchOnce",
    "JoinedTransfers",
    "Lanes",
    "Memory",
    "Pages",
    "ResidencyPin",
    "ResidentSpan",
    "Span",
    "StoragePlan",
    "Store",
    "SubSpan",
    "Swap",
    "Tiers",
    "Trace",
    "Transfer",
    "elastic",
    "fetched",
    "mirrored",
    "offset_names",
    "pageable",
    "storage_use_count",
    "trim",
    "zeros",
]
