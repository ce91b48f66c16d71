"""Logprobs of a batch whose samples stand one behind the other."""

import torch


def get_log_probs_and_entropy(
    logits,
    *,
    args,
    unconcat_tokens,
    total_lengths,
    response_lengths,
    with_entropy=False,
    entropy_requires_grad=True,
    non_loss_data=True,
    max_seq_lens=None,
):
    """A tensor for each sample, as long as its response."""
    made, start = [], 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end = start + total
        of_response = logits[0, end - response - 1 : end - 1].log_softmax(-1)
        made.append(torch.gather(of_response, -1, tokens[-response:, None])[:, 0])
        start = end
    return {"log_probs": made}
