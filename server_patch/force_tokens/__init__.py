"""Test support: make a real engine generate scripted token ids. Never part of a production server.

The ids in `force_ids` replace the output, one per step. Then the model continues, so a script normally ends with an
end-of-turn id. Logprobs stay the model's own.

    vLLM     `sampling_params.extra_args`, on OpenAI routes `vllm_xargs`
    SGLang   `sampling_params.custom_params`, on OpenAI routes `custom_params`
"""
