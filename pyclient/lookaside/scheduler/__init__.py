"""The scheduler role: which prefixes to load, which pages to save, what to pin.

All of it runs on vLLM's scheduler thread. Nothing here moves KV bytes. No call waits, except
reset_cache, which has a deadline; clearing.py goes on after it.

==================  ================================================================
role.py             the calls that vLLM makes; it only wires the parts below together
setup.py            what all parts know: settings, sidecars, statistics, geometry
requests.py         what is known of one request
contract.py         what the role needs of the sidecars of all ranks
hits.py             lookups, and the hit that vLLM is told
states.py           the states of Mamba and its kin: where a hit may end
loads.py            loads that are ordered, and how they ended
in_step.py          loads within the step that asks
advice.py           what the sidecars are advised about pages that they hold
saves.py            pages that are handed to the workers, and the blocks pinned for them
promises.py         prompts that one instance hands over to another
names.py            how the pages of a request are named
identification.py   when that is known
epochs.py           which weights the engine has
announcements.py    pages that KV events tell of
rows.py             the blocks of pages in vLLM's block tables: arithmetic alone
pace.py             how long steps and prefills take
==================  ================================================================

**Roles.** A kv_producer stores and never looks up, a kv_consumer looks up and never stores, kv_both
does both.

**Hybrids.** A model's layers may be in several KV-cache groups. A page is then as many tokens as
vLLM schedules by, with the blocks of all groups (layout.py). vLLM frees what a sliding window has
left behind; its table has the null block there. A chunk is no longer than the shortest window, so
what is stored as it fills is whole. When vLLM's own cache had pages of a prefix, the request has
no more of a window than it needs, but that cache may still hold the rest. Pages that are not whole
even so are named and not copied. A load fills what vLLM's table has: all blocks of full attention,
and of a window the blocks that it reaches from the hit's end.

No module here imports one of the worker role.
"""

from lookaside.scheduler.role import SchedulerConnector

__all__ = ["SchedulerConnector"]
