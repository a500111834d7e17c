"""Where state rests, and how it comes: a tier places spans, and a span is fetched before its use and committed after it.

    device, host   spans are always there: fetching and committing them costs nothing
    disk           a span's memory keeps its address, and its pages come with the bytes of a file, and go

Nobody else needs to know which it is.
"""

from shoal.tier.copied import Copied, above
from shoal.tier.elastic import Elastic, elastic
from shoal.tier.lanes import Lanes
from shoal.tier.memory import pageable, trim, users, zeros
from shoal.tier.pages import Pages
from shoal.tier.part import InUse, Part, Together, held, on_disk
from shoal.tier.residence import Residence, Tiers
from shoal.tier.span import Kept, Span, Transfer, behind
from shoal.tier.stay import Stay
from shoal.tier.store import Disk, Memory, Store
from shoal.tier.swap import Swap
from shoal.tier.swapped import Swapped
from shoal.tier.trace import Event, Trace

__all__ = ["Copied", "Disk", "Elastic", "Event", "InUse", "Kept", "Lanes", "Memory", "Pages", "Part", "Residence", "Span",
           "Stay", "Store", "Swap", "Swapped", "Tiers", "Together", "Trace", "Transfer", "above", "behind", "elastic",
           "held", "on_disk", "pageable", "trim", "users", "zeros"]
