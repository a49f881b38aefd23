"""The state of an optimizer as tensors by parameter name, as a checkpoint stores it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.training.muon import Muon

UNTOUCHED = "untouched"  # marks a parameter that never had a gradient, as opposed to one whose state is missing


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's state as flat tensors named 'slot/parameter name', bit for bit.

    `parameters` is `dict(model.named_parameters())`. Hyperparameters such as learning rates come from the config instead.
    """
    flat: dict[str, Tensor] = {}
    for name, parameter in _optimized(optimizer, parameters).items():
        slots = {slot: value for slot, value in optimizer.state.get(parameter, {}).items() if value is not None}
        for slot, value in slots.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(f"Optimizer state '{slot}' of '{name}' is not a tensor: use an optimizer like AdamW.")
            flat[f"{slot}/{name}"] = value
        if not slots:
            flat[f"{UNTOUCHED}/{name}"] = torch.zeros(0, dtype=torch.uint8)
    return flat


def load_optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, Tensor], flat: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` returned; check all of it before changing anything."""
    expected = _optimized(optimizer, parameters)
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in flat.items():
        slot, _, name = key.partition("/")
        if name not in expected:
            raise CheckpointError(
                f"The checkpoint has optimizer state for '{name or key}', which the model does not train: use the run's config."
            )
        found.setdefault(name, {})[slot] = value
    present = {slot for slots in found.values() for slot in slots} - {UNTOUCHED}
    for name, parameter in expected.items():
        if name not in found:
            raise CheckpointError(f"The checkpoint lacks optimizer state for '{name}': use the run's own config.")
        required = _slots(optimizer, parameter, present)
        if set(found[name]) not in (required, {UNTOUCHED}):
            raise CheckpointError(f"Optimizer state of '{name}' has {sorted(found[name])} but needs {sorted(required)}.")
        for slot, value in found[name].items():
            if slot != UNTOUCHED and value.shape not in (parameter.shape, torch.Size([])):
                raise CheckpointError(
                    f"Optimizer state '{slot}' of '{name}' has shape {tuple(value.shape)} but the parameter "
                    f"{tuple(parameter.shape)}: use the run's own config."
                )
    on_device = {p: bool(g.get("capturable") or g.get("fused")) for g in optimizer.param_groups for p in g["params"]}
    optimizer.state.clear()
    for name, parameter in expected.items():
        if UNTOUCHED not in found[name]:
            optimizer.state[parameter] = {
                # The step counter lives on the CPU unless the optimizer runs as one kernel on the device.
                slot: value.to(parameter.device if slot != "step" or on_device[parameter] else "cpu", copy=True)
                for slot, value in found[name].items()
            }


def _optimized(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that the optimizer trains, by name."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in trained):
        raise CheckpointError("The optimizer trains a parameter that has no name: pass every named parameter of the model.")
    return {names[id(parameter)]: parameter for parameter in trained}


def _slots(optimizer: Optimizer, parameter: Tensor, present: set[str]) -> set[str]:
    """Return the slots of a parameter after its first update; for unknown optimizers, the slots of any parameter."""
    if isinstance(optimizer, Muon):
        return set(optimizer.slots(parameter))
    if not isinstance(optimizer, (Adam, AdamW)):
        return present
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    return {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if amsgrad else set())
