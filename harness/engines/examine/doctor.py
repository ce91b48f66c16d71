"""Finds the capabilities of an engine server, with evidence, for `harness engine doctor`.

The server itself tells its kind. Abilities are tried with a few tiny generations. A pause or a weight update would
disturb other clients, so only its route is checked. An unverifiable claim is `unknown` with the reason, never a guess.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from harness.engines.base import LogprobScale
from harness.engines.kinds import ExaminedServer, server_kinds
from harness.engines.logprob_scale import CERTAIN, TEMPERATURE, TOLERANCE, measure_scale
from harness.engines.remote.address import EngineAddress
from harness.engines.remote.http_client import EngineClient, HttpCall
from harness.engines.remote.provider import RemoteProvider
from harness.engines.remote.served_model import find_difference, find_model, texts_to_compare
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.sglang_wire import ModelInfo, ServerInfo
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.engines.remote.vllm_control import MISSING, VersionAnswer
from harness.errors import EngineError, EngineReplyInvalid, EngineUnavailable
from harness.machine.findings import Finding, Level
from harness.tokens.tokenizer import Tokenizer, read_json
from harness.types import FinishReason, GenerationRequest, GenerationResult, Json, SamplingParams, as_ids
from server_patch.repeat_terminate import RepeatTerminateConfig

_ANSWER_S = 30.0
_GENERATION_S = 60.0
_PROMPT = as_ids((1, 2, 3, 4))  # every vocabulary has them
_SHORT = SamplingParams(4, temperature=0.0, ignore_eos=True)
_ABORTED_TOKENS = 512  # enough to be still running when the abort arrives
_ANY_ID = 2**31 - 1
_SPAN_ROUTE = "/inference/v1/generate"
_NEEDED = frozenset({"token endpoint", "prompt logprobs", "raw logprobs", "abort", "vocabulary", "tokenizer"})
_ANSWERS = {Level.OK: "yes", Level.UNKNOWN: "unknown", Level.WARN: "no", Level.FAIL: "no"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    url: str
    engine: str
    """Engine that samples."""
    protocol: str
    """`sglang` or `vllm`, the prefix of the URL in `--engine`."""
    version: str
    findings: tuple[Finding, ...]

    @property
    def is_usable(self) -> bool:
        """True if nothing that sessions need is missing."""
        return all(each.level is not Level.FAIL for each in self.findings)

    def to_json(self) -> Json:
        findings = [
            {
                "capability": each.check,
                "answer": _ANSWERS[each.level],
                "evidence": each.found,
                "is_needed": each.check in _NEEDED,
            }
            for each in self.findings
        ]
        server = {"url": self.url, "engine": self.engine, "protocol": self.protocol, "version": self.version}
        return server | {"is_usable": self.is_usable, "findings": findings}


async def diagnose(url: str, *, tokenizer: Tokenizer | None = None, api_key: str = "") -> Diagnosis:
    """Examine the server at `url`. Raises `EngineUnavailable` for an unknown one, `ScenarioError` for a bad `url`."""
    EngineAddress.parse(url)
    client = EngineClient(url, "engine", api_key=api_key)
    client.open()
    try:
        server = await _identify(client)
        vocabulary = _vocabulary(server, tokenizer)
        provider = server.provider(
            url,
            vocab_size=vocabulary.size or _ANY_ID,
            logprob_scale=LogprobScale.AFTER_TEMPERATURE,  # trusted, so that entering measures nothing
            generation_timeout_s=_GENERATION_S,
            api_key=api_key,
            repeat_guard=RepeatTerminateConfig(enabled=False),
        )
        async with provider:
            findings = await _Examination(client, server, provider, vocabulary, tokenizer).findings()
    finally:
        await client.close()
    return Diagnosis(client.url, server.engine, server.protocol, server.version, findings)


class _Vocabulary(NamedTuple):
    size: int | None
    """Number of valid ids; None if unknown."""
    claim: "_Claim"


class _Claim(NamedTuple):
    holds: bool | None
    """None if it cannot be verified."""
    evidence: str

    def of(self, check: str) -> Finding:
        """Return the finding; a missing capability fails if sessions need it."""
        if self.holds is None:
            return Finding(check, Level.UNKNOWN, self.evidence)
        missing = Level.FAIL if check in _NEEDED else Level.WARN
        return Finding(check, Level.OK if self.holds else missing, self.evidence)


async def _identify(client: EngineClient) -> ExaminedServer:
    titles, refusals = [], []
    for kind in server_kinds().values():
        if kind.examined is None:
            continue
        path, examine = kind.examined
        answer = await client.ask(HttpCall("GET", path, _ANSWER_S))
        if answer.status == 200:
            return await examine(client, answer.content)
        titles.append(kind.title)
        refusals.append(f"GET {path} with {answer.status}")
    raise EngineUnavailable(
        f"{client.url} is neither {' nor '.join(titles)}: it answers {' and '.join(refusals)};"
        " give the address of an engine server itself"
    )


async def examine_sglang(client: EngineClient, content: bytes) -> ExaminedServer:
    info = client.decode(HttpCall("GET", "/model_info", _ANSWER_S), content, ModelInfo)
    server = await client.get("/server_info", ServerInfo, deadline_s=_ANSWER_S)
    return ExaminedServer(
        engine=server.engine,
        protocol="sglang",
        version=server.version,
        provider=SGLangTokenProvider,
        model=await find_model(client),
        weights=Path(info.model_path),
        generate_route="/generate",
        pause_route="/pause_generation",
        weights_route="/update_weights_from_disk",
    )


async def examine_vllm(client: EngineClient, content: bytes) -> ExaminedServer:
    version = client.decode(HttpCall("GET", "/version", _ANSWER_S), content, VersionAnswer)
    model = await find_model(client)
    spans = await client.ask(HttpCall("POST", _SPAN_ROUTE, _ANSWER_S, {}))
    return ExaminedServer(
        engine="vllm",
        protocol="vllm",
        version=version.version,
        provider=VLLMTokenProvider,
        model=model,
        weights=Path(model.root),
        generate_route="/v1/completions" if spans.status in MISSING else _SPAN_ROUTE,
        pause_route="/pause",
        weights_route="/collective_rpc",
    )


def _vocabulary(server: ExaminedServer, tokenizer: Tokenizer | None) -> _Vocabulary:
    # The weights decide where they are readable here, since a tokenizer may have fewer ids.
    config = read_json(server.weights / "config.json")
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if isinstance(size, int):
        where = f"{size} ids, as {server.weights / 'config.json'} says"
        if tokenizer is not None and tokenizer.vocab_size > size:
            return _Vocabulary(size, _Claim(False, f"{where}, but the tokenizer has {tokenizer.vocab_size}"))
        return _Vocabulary(size, _Claim(True, where))
    if tokenizer is not None:
        size = tokenizer.vocab_size
        return _Vocabulary(size, _Claim(None, f"the weights cannot be read here; the tokenizer has {size} ids"))
    return _Vocabulary(None, _Claim(None, "the weights cannot be read here; pass --model"))


class _Examination(NamedTuple):
    client: EngineClient
    server: ExaminedServer
    provider: RemoteProvider
    vocabulary: _Vocabulary
    tokenizer: Tokenizer | None

    async def findings(self) -> tuple[Finding, ...]:
        found = [await _find("token endpoint", self._token_endpoint)]
        # The rest needs tokens.
        if found[0].level is Level.OK:
            found += [
                await _find("version spans", self._version_spans),
                await _find("prompt logprobs", self._prompt_logprobs),
                await _find("raw logprobs", self._logprob_scale),
                await _find("abort", self._abort),
                await _find("repeat guard", self._repeat_guard),
            ]
        usable, stated = self.provider.capabilities.context_length, self.server.model.max_model_len
        context = f"{usable} tokens" if usable == stated else f"{usable} tokens can be used of the {stated} it states"
        modes = f"modes {', '.join(sorted(self.provider.capabilities.pause_modes))}"
        pause = partial(self._find_route, self.server.pause_route, modes)
        update = partial(self._find_route, self.server.weights_route, "from a folder on the server's machine")
        return (
            *found,
            await _find("pause", pause),
            await _find("weight updates", update),
            Finding("context length", Level.OK, context),
            self.vocabulary.claim.of("vocabulary"),
            await _find("tokenizer", self._same_tokenizer),
        )

    async def _token_endpoint(self) -> _Claim:
        if (await self.provider.health()).paused:
            return _Claim(False, "the engine is paused and generates nothing; resume it and retry")
        result = await self._sample()
        size = result.output_ids.size
        return _Claim(True, f"{self.server.generate_route} returned {size} ids with {size} logprobs")

    async def _version_spans(self) -> _Claim:
        if self.server.generate_route == "/v1/completions":
            return _Claim(False, "/v1/completions reports none; start vLLM with --enable-scale-out")
        spans = (await self._sample()).version_spans
        return _Claim(True, ", ".join(f"{span.start}..{span.end} by {span.version!r}" for span in spans))

    async def _prompt_logprobs(self) -> _Claim:
        scores = await self.provider.score(_PROMPT, start=1)
        return _Claim(True, f"scoring {_PROMPT.size} tokens from the second on returned {scores.logprobs.size}")

    async def _logprob_scale(self) -> _Claim:
        if self.vocabulary.size is None:
            return _Claim(None, "cannot be measured without the size of the vocabulary; pass --model")
        try:
            measured = await measure_scale(self.provider)
        except EngineReplyInvalid as error:  # a reply that contradicts itself is found elsewhere
            return _Claim(None, error.message)
        if measured is None:
            return _Claim(None, CERTAIN)
        is_raw = measured.mean_difference <= TOLERANCE
        advice = "" if is_raw else "; they are after temperature, see docs/engines.md"
        return _Claim(
            is_raw,
            f"{measured.tokens} tokens sampled at temperature {TEMPERATURE:g} and then scored differ by"
            f" {measured.mean_difference:.4f} nats in the mean, at most {TOLERANCE} is expected{advice}",
        )

    async def _abort(self) -> _Claim:
        room = self.provider.capabilities.context_length - _PROMPT.size
        params = SamplingParams(min(_ABORTED_TOKENS, room), temperature=1.0, ignore_eos=True)
        request_id, is_told, result = uuid4().hex, False, None
        stream = self.provider.stream(GenerationRequest(_PROMPT, params, request_id=request_id))
        async with aclosing(stream) as pieces:  # type: ignore[type-var]  # an async generator, which the protocol does not say
            async for piece in pieces:
                if isinstance(piece, GenerationResult):
                    result = piece
                elif not is_told:
                    is_told = bool(await self.provider.abort(request_id))
        assert result is not None
        told = f"told to end after its first tokens, a request for {params.max_new_tokens} ended"
        told += f" with {result.finish_reason.value!r} after {result.output_ids.size}"
        return _Claim(result.finish_reason is FinishReason.ABORT or None, told)

    async def _repeat_guard(self) -> _Claim:
        digest = await self.provider.active_guard()
        if digest is None:
            return _Claim(False, "a probe was generated without the guard")
        return _Claim(True, f"the scheduler answered a probe with configuration {digest[:12]}")

    async def _find_route(self, path: str, what: str) -> _Claim:
        # A GET of a POST route has no effect.
        status = (await self.client.ask(HttpCall("GET", path, _ANSWER_S))).status
        if status in MISSING - {405}:
            advice = "; start vLLM with VLLM_SERVER_DEV_MODE=1" if self.server.engine == "vllm" else ""
            return _Claim(False, f"there is no POST {path}{advice}")
        return _Claim(True, f"POST {path} exists, {what}; not tried")

    async def _same_tokenizer(self) -> _Claim:
        if self.tokenizer is None:
            return _Claim(None, "compared with nothing; pass --model")
        difference = await find_difference(self.client, self.tokenizer)
        if difference is not None:
            return _Claim(False, f"{difference}, in --model")
        return _Claim(True, f"/tokenize gave the ids of --model for {len(texts_to_compare(self.tokenizer))} texts")

    async def _sample(self) -> GenerationResult:
        return await self.provider.generate(GenerationRequest(_PROMPT, _SHORT, request_id=uuid4().hex))


async def _find(check: str, probe: Callable[[], Awaitable[_Claim]]) -> Finding:
    try:
        claim = await probe()
    except EngineUnavailable as error:
        claim = _Claim(None, error.message)
    except EngineError as error:
        claim = _Claim(False, error.message)
    return claim.of(check)
