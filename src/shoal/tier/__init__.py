"""Where state rests, and how it comes: a tier places spans, and a span is fetched before its use and committed after it.

    device, host   spans are always there: fetching and committing them costs nothing
    disk           a span's memory keeps its address, and its pages come with the bytes of a file, and go

Nobody else needs to know which it is.
"""

from shoal.tier.device_mirror import DeviceMirror, above
from shoal.tier.disk_span import DiskSpan
from shoal.tier.elastic import Elastic, elastic
from shoal.tier.lanes import Lanes
from shoal.tier.memory import pageable, trim, users, zeros
from shoal.tier.pages import Pages
from shoal.tier.residency_pin import ResidencyPin
from shoal.tier.span import ResidentSpan, Span, Transfer, behind
from shoal.tier.storage import StoragePlan, Tiers
from shoal.tier.store import Disk, Memory, Store
from shoal.tier.sub_span import InUse, JoinedTransfers, SubSpan, held, on_disk
from shoal.tier.swap import Swap
from shoal.tier.trace import Event, Trace

__all__ = [
           "DeviceMirror",
           "Disk",
           "DiskSpan",
           "Elastic",
           "Event",
           "InUse",
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
           "above",
           "behind",
           "elastic",
           "held",
           "on_disk",
           "pageable",
           "trim",
           "users",
           "zeros",
]
