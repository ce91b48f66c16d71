"""Test support: makes a real engine say scripted token ids, request by request.

A request with `force_ids` says exactly these, one per step, whatever the model thinks; after the last of them the model
is on its own, so a script normally ends with an end-of-turn id. Everything else is real: HTTP, scheduling, streaming,
aborts, pauses, stop conditions. It makes a random model of two layers play any conversation.

| engine | where `force_ids` goes | the logprobs of forced tokens |
| --- | --- | --- |
| vLLM | `sampling_params.extra_args`, on OpenAI routes `vllm_xargs` | those of the model's own distribution |
| SGLang | `sampling_params.custom_params`, on OpenAI routes `custom_params` | those of the model's own distribution |

Never part of a production server: the distribution declares no entry point for it, a lane does.
"""
