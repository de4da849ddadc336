"""The mathematics of PPO and its relatives as pure functions on tensors: no model, no state, only torch.
(`estimators` are functions too, with settings as their fields.)

One convention holds everywhere, so that no caller has to shift or trim: tensors are response-aligned,
[b, s]: b sequences of a micro-batch, s response columns padded to the right. Column t belongs to response
token t: its log-prob, its value V (of the state *before* the token is chosen) and its reward. The bool
`response_mask` is True on real response tokens; it may have holes, and rows may be all False. What lies
outside it may be anything, NaN included: it is removed by selection (`torch.where`) before it can matter,
because 0 * NaN is NaN, in gradients too.

Losses and statistics come as sums beside counts, never as means: sums add up over micro-batches and ranks,
and one division at the end gives the exact global mean however the batch was split.
"""
