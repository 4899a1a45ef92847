"""The worker role: moves pages between this rank's KV cache and the mapped arena.

============  ======================================================================
role.py       the calls that vLLM makes; it only wires the parts below together
link.py       the session with this rank's sidecar, and the memory that it gives
pages.py      the blocks and bytes of pages: arithmetic alone
saves.py      from the order to save pages to its acknowledgement
loads.py      from the order to load pages to the end of its copy, on a thread of its own
reports.py    what became of loads, until vLLM asks
quiet.py      the end of all copies when vLLM goes to sleep
forwards.py   how long a step's forward takes
============  ======================================================================

One step, on the worker's main thread:

1. bind_connector_metadata takes over the leases of the step's loads (PrepareLoad) and hands them to
   the loader thread, which copies as soon as the grants are in. Then it asks for room
   (PrepareStore) for the step's saves. All of this runs beside the forward.
2. start_load_kv carries out the loads within the step (docs/in-step.md), before the forward. It
   does nothing for the others: vLLM may call it after the forward, and no copy waits for that.
3. wait_for_save collects the room, waiting a little for it at most, and copies. On a CPU the copy
   is over when it returns. On CUDA the copy is queued behind the forward, and the scheduler keeps
   the blocks until build_connector_worker_meta names the save.
4. get_finished and the calls after it report what has ended. If the scheduler says that nothing is
   computed, get_finished first waits a little for a load to end: until then vLLM does nothing but
   ask again, on the very cores that copy. (The arguments of start_load_kv do not tell: the V2 model
   runner calls it after the forward's context.)

No block of a load is written before 1, where vLLM is done with what the block was before. Both
model runners bind after they have queued the zeroing and the copies of blocks that the step asks
for. In handle_preemptions, which comes first, a load would be too early. The forwards of earlier
steps are over on a CPU, and queued before the load's mark on CUDA (copies.py). The step's own
forward writes to other blocks: those of a load belong to a request that is not computed before the
load is reported. So a load that is shorter than its step's forward is reported by get_finished of
the same step.

A copy beside a forward takes cores from it on a CPU. One begun later would take them from the next
forward, for as long.

Between 1 and 3 lies the forward. If the scheduler asks for its time, build_connector_worker_meta
reports it, of this step or, on CUDA, of a later one: events on the stream measure it, so that
nothing waits for the device.

What is promised to vLLM, whatever the sidecar does:

- No wait is without a deadline. (An exception is a bug, which the facade contains.)
- Every request that a load was ordered for is reported as received exactly once, and not before the
  last byte has moved: vLLM may free its blocks then.
- Every save is acknowledged exactly once, carried out or not, and not before the last byte of its
  blocks has been read.
- A load counts as good only if the session that leased its pages is still there after the copy, and
  its sidecar alive. Otherwise the load's blocks are reported as invalid. vLLM then computes them;
  the local prefix before them stays. Where a model has a sliding window or several KV-cache groups,
  an invalid block would end the engine, or leave a window that begins too late. There the request
  as a whole is reported as failed, and vLLM starts over with it.

A session that is lost while copies run is replaced at once, and the next one may have the same
mappings. The lost one's socket and claim stay open until the last of its copies has ended, however
long that takes. When the socket closes, a sidecar that lives gives the session's room to others;
when the claim closes, the successor of one that has died may. A load of a lost session counts as
failed, whatever its copy brought. Mappings, and pins of a GPU's driver, outlive the session: the
next one takes over those whose regions it has too, and maps and pins only the others.

No module here imports one of the scheduler role.
"""

from lookaside.worker.role import WorkerConnector

__all__ = ["WorkerConnector"]
