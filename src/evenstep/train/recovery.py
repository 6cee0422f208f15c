"""Recovery: after a failed step, remove what DDP and fully_shard hold of it.

Both keep state between a forward and the end of its backward, outside `.grad`. fully_shard also
keeps gradients that it has not exchanged yet, and would add them to the next step.

    recover(framework)  # no communication; call it on every rank on which the step failed
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evenstep.train.framework import Framework, fsdp_groups, groups_of


def recover(framework: Framework) -> None:
    """Make the model ready for the next step, as if the failed one had not run.

    Collectives that a rank started alone are not undone: if only some ranks failed, the group of
    processes has to be started again (see `Watch`).
    """
    if framework.kind == "ddp":
        # On every rank that failed, wherever it failed: DDP exchanges the order of its buckets in
        # the second step after a reset, on all ranks or none.
        reset = getattr(framework.model.reducer, "_reset_state", None)
        if reset is not None:
            reset()
    if framework.kind == "fsdp":
        _recover_sharded(framework.model)


def held_gradients(framework: Framework) -> list[Tensor]:
    """Gradients of this step that fully_shard has not exchanged yet."""
    if framework.kind != "fsdp":
        return []
    held = [
        gradient
        for group in fsdp_groups(framework.model)
        for parameter in group.fsdp_params
        for gradient in (
            getattr(parameter, "unsharded_accumulated_grad", None),
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        )
    ]
    return [gradient for gradient in held if gradient is not None]


def _recover_sharded(model: Any) -> None:
    root = model._get_fsdp_state()
    if root._is_root is not None:  # it ran a forward
        reset = getattr(model, "reset_iter_state", None)  # torch >= 2.13
        if reset is None:
            reset_state(root)
        else:
            reset()
    for group in fsdp_groups(model):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
            event = getattr(parameter, "grad_offload_event", None)
            if event is not None:
                event.synchronize()
                parameter.grad_offload_event = None


# Before torch 2.13 -------------------------------------------------------------------------------


def reset_state(root: Any) -> None:
    """What `FSDPModule.reset_iter_state` does since torch 2.13: end all that is in flight."""
    context, shared = root._comm_ctx, root._state_ctx
    stream = root._device_handle.current_stream()
    for name in ("all_gather_state", "reduce_scatter_state"):
        state = getattr(context, name, None)
        if state is not None:
            _wait(stream, getattr(state, "event", None))
            setattr(context, name, None)
    for state in getattr(context, "reduce_scatter_states", ()):
        _wait(stream, state.event)
    for name in ("reduce_scatter_states", "post_forward_order"):
        getattr(context, name, []).clear()
    for state in shared.all_states:
        getattr(state, "_modules_to_run_forward", set()).clear()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        for group in groups_of(state):
            _reset_group(group, idle, stream)
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _reset_group(group: Any, idle: Any, stream: Any) -> None:
    gathered = group._all_gather_result
    if gathered is not None:
        _wait(stream, gathered.all_gather_event)
        if hasattr(gathered.all_gather_work, "wait"):
            gathered.all_gather_work.wait()
        group._all_gather_result = None
    for name in ("_post_reduce_event", "_reshard_after_forward_event"):
        _wait(stream, getattr(group, name, None))
        setattr(group, name, None)
    _wait(stream, getattr(getattr(group, "_all_reduce_state", None), "event", None))
    group._all_reduce_state = None
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = idle
    group._to_sharded()


def _wait(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)
