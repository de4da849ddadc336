"""The rules that join several settings, one function each, all checked before anything is launched.

Every rule takes the whole config and raises ValueError: what was given, what is allowed, and the override that changes
it. There is a module for each part of a config.
"""

from __future__ import annotations

from trainer.config import objectives
from trainer.config.rules import algo, batch, limits, memory, model, parallel, rollout, run
from trainer.config.schema import Config

RULES = (
    limits.check_values,
    algo.check_pieces,
    algo.check_roles,
    algo.check_specs,
    algo.check_who_pays,
    algo.check_critic_settings,
    algo.check_critic_start,
    algo.check_groups,
    algo.check_kl,
    algo.check_sampling,
    algo.check_old_log_probs,
    algo.check_schedules,
    memory.check_nccl_ub,
    memory.check_destroy_process_groups,
    memory.check_policies,
    memory.check_restore_sources,
    memory.check_flags_against_sources,
    memory.check_main_params_source,
    memory.check_disk,
    memory.check_optim_format,
    memory.check_tags,
    parallel.check_overlap,
    model.check_model_shapes,
    model.check_rope_scaling,
    parallel.check_context_parallel,
    parallel.check_world_size,
    parallel.check_tensor_parallel,
    parallel.check_pipeline_layers,
    parallel.check_pipeline_micro_batches,
    model.check_experts,
    parallel.check_expert_parallel,
    memory.check_node_copies,
    rollout.check_vllm,
    run.check_nodes,
    objectives.check_objective,
    model.check_checkpoints,
    batch.check_batch_sizes,
    model.check_kernels,
    model.check_attention_backend,
    batch.check_equal_minibatches,
    batch.check_automatic_tokens,
    batch.check_a_sequence_fits,
    batch.check_packing,
    batch.check_tokens_in_pipeline,
    batch.check_lengths,
    run.check_profile_steps,
    run.check_task,
    algo.check_turns,
    run.check_tokenizer,
)


def check(config: Config, *, explicit_flags: memory.ExplicitFlags) -> None:
    """Check every rule, in the order of :data:`RULES`.

    Args:
        explicit_flags: (role, flag name) pairs that the user set, as opposed to those that follow from the policy.

    Raises:
        ValueError: the first broken rule.
    """
    memory.check_explicit_flags(config, explicit_flags)
    for rule in RULES:
        rule(config)
