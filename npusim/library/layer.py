"""A layer, or a model, on a node."""

from __future__ import annotations

from npusim.kernel import LayerTiling, ModelProblem, left_on_nodes, model_program, node_schedule, offload_schedule

SCHEDULES = (
    offload_schedule("classic", "K and V on the host: uploaded, attention on the devices"),
    offload_schedule("cooperative", "K and V on the host: attention on its cores, Q down and O up"),
    node_schedule(
        "layer",
        "a model, layer by layer: prefill, or a decoding step",
        model_program,
        tiling=LayerTiling,
        problem=ModelProblem,
        left=left_on_nodes,
    ),
)
