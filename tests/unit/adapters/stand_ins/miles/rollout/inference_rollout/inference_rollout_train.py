"""One step: groups until there are enough, then the abort."""

import asyncio

from miles.rollout.inference_rollout.inference_rollout_common import generate_and_rm_group
from miles.utils.misc import call_agent_abort_hook, load_function


async def abort(state, pendings, rollout_id):
    """State, engines, agents, pending groups: in this order. Returns these groups."""
    assert not state.aborted
    state.aborted = True
    await state.args.abort_engines()
    await call_agent_abort_hook(state.args)
    return [await pending for pending in asyncio.as_completed(pendings)]


async def generate_rollout_async(state, rollout_id, data_source):
    """The groups of a step that the filter keeps, and those that were pending then."""
    args, pendings, data = state.args, set(), []
    dynamic_filter = load_function(args.dynamic_sampling_filter_path)
    while len(data) < args.rollout_batch_size:
        while len(pendings) < args.rollout_batch_size - len(data):
            groups = data_source(args.over_sampling_batch_size)
            pendings |= {
                asyncio.create_task(generate_and_rm_group(state, each, state.sampling_params.copy())) for each in groups
            }
        done, pendings = await asyncio.wait(pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            assert len(group) == args.n_samples_per_prompt
            if dynamic_filter(args, group) and len(data) < args.rollout_batch_size:
                data.append(group)
    aborted = await abort(state, pendings, rollout_id)
    state.reset()
    return data, aborted
