"""The Python API, in the field's own shape: ``LLM(model).generate(prompts, SamplingParams(…))`` and ``.chat(…)``."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Sequence as Seq
from itertools import count
from pathlib import Path
from typing import Any

from fitment.errors import FitmentError, Problems
from fitment.formats import Checkpoint, recognise
from fitment.hardware import Device
from fitment.plugins import Registry, load
from fitment_engine.binding import Progress
from fitment_engine.chat import ChatTemplate
from fitment_engine.engine import Engine
from fitment_engine.fetch import resolve
from fitment_engine.outputs import RequestOutput
from fitment_engine.runner import Runner
from fitment_engine.sampling_params import SamplingParams
from fitment_engine.tokenizer import Tokenizer, tokenizer_for
from fitment_matrix.gate import Plan, Request, admit_first

Message = Mapping[str, Any]
Prompt = str | Seq[int]
"""Text, or token ids."""


class LLM:
    """A model, loaded and ready.

    Args:
        model: A path, a name of the built-in list, or a hub id.
        device: A device's id such as ``"cpu:0"``; None takes the first that admits the request.
        chat_template: A Jinja template that replaces the checkpoint's own.
        progress: Called with the bytes of each tensor as it is loaded.
        options: What :class:`fitment_matrix.gate.Request` takes: ``dtype``, ``activations``, ``kv_dtype``, ``max_model_len``,
            ``max_num_seqs``, ``max_batch_tokens``, ``kv_memory_bytes``, ``features``, ``kernels``.

    Raises:
        FitmentError: the model cannot be had, or the request cannot be admitted (``Unfit``); before any weight is read.
    """

    def __init__(self, model: str | Path, *, device: str | None = None, chat_template: str | None = None,
                 progress: Progress | None = None, **options: Any) -> None:
        checkpoint = recognise(resolve(str(model)))
        plan = admit_here(checkpoint, load(), device, **options)
        self._start(checkpoint, plan, chat_template, progress)

    @classmethod
    def from_plan(cls, checkpoint: Checkpoint, plan: Plan, chat_template: str | None = None, progress: Progress | None = None) -> LLM:
        """A model from a plan that the gate has admitted."""
        llm = cls.__new__(cls)
        llm._start(checkpoint, plan, chat_template, progress)
        return llm

    def _start(self, checkpoint: Checkpoint, plan: Plan, chat_template: str | None, progress: Progress | None) -> None:
        self.plan = plan
        self.tokenizer: Tokenizer = tokenizer_for(checkpoint.tokenizer, checkpoint.model.eos_token_ids)
        self._template = ChatTemplate.for_tokenizer(self.tokenizer, chat_template)
        self._engine = Engine(Runner(plan, checkpoint, progress), self.tokenizer)
        self._ids = count()

    @property
    def engine(self) -> Engine:
        """The engine, for callers that step it themselves."""
        return self._engine

    def generate(self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
                 ) -> list[RequestOutput]:
        """Continue prompts, batched as they fit.

        Args:
            prompts: Texts or lists of token ids; one, or any number.
            sampling_params: One for all, or one each; default ``SamplingParams()``.

        Returns:
            A finished output for each prompt, in their order.

        Raises:
            Problems: every prompt that cannot be served; nothing is computed then.
        """
        many: Seq[Prompt] = [prompts] if _is_one(prompts) else prompts  # type: ignore[assignment, list-item]
        return self._run([self.encode(prompt) for prompt in many], [prompt if isinstance(prompt, str) else None for prompt in many],
                         _each(sampling_params, len(many)))

    def chat(self, messages: Seq[Message] | Seq[Seq[Message]], sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
             ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of messages with ``role`` and ``content``; as :meth:`generate`."""
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        ids = [self.encode_chat(chat) for chat in chats]  # type: ignore[arg-type]
        return self._run(ids, [None] * len(ids), _each(sampling_params, len(ids)))

    def stream(self, prompt_ids: Seq[int], sampling_params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Continue one prompt, given as token ids; yields its output (one object) after each step. Closing it aborts the request."""
        request_id = str(next(self._ids))
        self._engine.add_request(request_id, None, prompt_ids, sampling_params or SamplingParams())
        try:
            while self._engine.has_work:
                for output in self._engine.step():
                    if output.request_id == request_id:
                        yield output
                        if output.finished:
                            return
        finally:
            self._engine.abort([request_id])

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text (with the model's own start token, control tokens in it taken as text), or the ids given."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Seq[Message]) -> list[int]:
        """Token ids of a conversation under the chat template, ready for the assistant's turn."""
        return self.tokenizer.encode(self._template.render(messages), parse_special=True, add_bos=False)

    def _run(self, prompt_ids: list[list[int]], texts: Seq[str | None], params: Seq[SamplingParams]) -> list[RequestOutput]:
        problems = [f"prompt {i}: {problem}" for i, (ids, p) in enumerate(zip(prompt_ids, params, strict=True))
                    if (problem := self._engine.problem(ids, p))]
        if problems:
            raise Problems("generate", problems)
        order = [str(next(self._ids)) for _ in prompt_ids]
        for request_id, ids, text, p in zip(order, prompt_ids, texts, params, strict=True):
            self._engine.add_request(request_id, text, ids, p)
        finished: dict[str, RequestOutput] = {}
        try:
            while len(finished) < len(order):
                finished.update((output.request_id, output) for output in self._engine.step() if output.finished)
        finally:
            self._engine.abort(order)
        return [finished[request_id] for request_id in order]


def _is_one(prompts: Prompt | Seq[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _each(params: SamplingParams | Seq[SamplingParams] | None, number: int) -> Seq[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if len(params) != number:
        raise FitmentError(f"sampling_params: {len(params)} given for {number} prompts; give one, or one for each prompt")
    return params


def admit_here(checkpoint: Checkpoint, registry: Registry, device: str | None = None, **options: Any) -> Plan:
    """Ask the gate for a plan on a device that is here.

    Args:
        checkpoint: The open checkpoint.
        registry: The installed plugins.
        device: A device's id, or None: each device is tried in turn.
        options: What ``Request`` takes.

    Raises:
        FitmentError: there is no such device, or ``Unfit`` of the first device.
    """
    devices: Seq[Device] = registry.devices
    if device is not None:
        devices = [d for d in devices if d.id == device]
    if not devices:
        reasons = [reason.sentence() for platform in registry.platforms.values() for reason in platform.listing.reasons]
        known = ", ".join(d.id for d in registry.devices) or "; ".join(("none", *reasons))
        wanted = f"device {device!r} is not here" if device else "no device is here that could run a model"
        raise FitmentError(f"{wanted}; devices are {known}; `capabilities` says what is missing")
    request = Request.for_checkpoint(checkpoint, **options)
    return admit_first(request, devices, registry, registry.engines.get("fitment"))
