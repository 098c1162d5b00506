"""Requests to pooling models: tokenizes texts and pairs of texts, and replaces sampling parameters."""

from __future__ import annotations

from secrets import token_hex
from typing import Any

import msgspec

from engine.errors import ConfigError, ContextLengthError, RequestError
from engine.records.messages import EngineReady, RequestContext
from engine.records.pooling import WHOLE_PROMPT_TASKS, PoolingModel
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.tokenization.no_tokenizer import needs_tokenizer
from engine.tokenization.pair_template import PairTemplate
from engine.tokenization.tokenizer import Tokenizer
from engine.tokenization.unicode_text import readable

PLACEHOLDER_PARAMS = SamplingParams(
    max_tokens=1, eos_token_id=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
"""Sampling parameters of a pooling request, which ends with a token that is its end of sequence."""
MAX_CUTS = 8
"""Maximum number of cuts until a document fits: the rest may have one or two more tokens than before."""
MAX_TOKEN_CHARS = 256
"""Number of characters that are read per token of a text that is cut."""


def model_that_pools(pooling: PoolingModel | None) -> PoolingModel:
    """Returns the pooling model's data. RequestError if the model generates."""
    if pooling is None:
        raise RequestError("This model generates text; start it with --runner pooling to pool.", "model")
    return pooling


def for_what_the_model_does(context: RequestContext, pooling: PoolingModel | None) -> RequestContext:
    """Returns the context with checked ``pooling``. RequestError if the model pools and the request does not,
    or the reverse."""
    if pooling is None:
        if context.pooling is not None:
            model_that_pools(pooling)
        return context
    if context.pooling is None:
        raise RequestError(
            f"This model does not generate text: its task is {pooling.tasks[0]!r}. Ask for embeddings at "
            "/v1/embeddings, for classes at /classify, for scores at /score and /rerank.",
            "model",
        )
    params = context.pooling.checked(pooling)
    context = msgspec.structs.replace(context, pooling=params)
    if params.task in WHOLE_PROMPT_TASKS:  # all rows are computed, as no other request has this salt
        context = msgspec.structs.replace(context, cache_salt=token_hex(16))
    return context


class PoolingInputs:
    """Tokenizes for one pooling model. Its methods may be called on any thread."""

    def __init__(self, tokenizer: Tokenizer, ready: EngineReady, chat_template: str | None = None) -> None:
        """``chat_template``: the template for a cross-encoder's pairs. ConfigError if it takes no pairs."""
        self._model = model_that_pools(ready.pooling)
        self._tokenizer = tokenizer
        self._hf = tokenizer.hf
        self._backend = tokenizer.backend
        if self._backend is not None:  # folders of sentence-transformers may hold both
            self._backend.no_truncation()
            self._backend.no_padding()
        self._tells_segments = (
            self._model.tells_segments and "token_type_ids" in tokenizer.hf.model_input_names
        )
        self._max_model_len = ready.max_model_len
        self._pair_template: PairTemplate | None = None
        in_chat = chat_template is not None or self._model.in_chat
        if self._model.is_cross_encoder and in_chat and tokenizer.has_texts:
            try:
                self._pair_template = self.pair_template(chat_template)
            except RequestError as error:
                raise ConfigError(f"{error} This model scores pairs of texts in a chat.") from error

    def pair_template(self, chat_template: str | None) -> PairTemplate:
        """Returns this template for pairs, or the folder's. RequestError if it takes no pairs."""
        return PairTemplate(self._tokenizer, chat_template, system=self.prefix(None))

    def prefix(self, name: str | None) -> str:
        """The text that is put before an input: the one with this name, else the model's default."""
        prompts = self._model.prompts
        if name is None:
            return prompts.get(self._model.default_prompt or "", "")
        if name not in prompts:
            known = f"one of {', '.join(prompts)}" if prompts else "left out: this model has no prompts"
            raise RequestError(f"prompt_name must be {known}, got {name[:100]!r}.", "prompt_name")
        return prompts[name]

    def limit(self, truncate: int | None) -> int | None:
        """Maximum number of tokens to keep of an input; None if a longer one is refused."""
        if truncate is None:
            return None
        if truncate == -1:
            return self._max_model_len
        if not 1 <= truncate <= self._max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or from 1 to {self._max_model_len}, got {truncate}.",
                "truncate_prompt_tokens",
            )
        return truncate

    def encode(
        self,
        text: str,
        limit: int | None,
        *,
        prefix: str = "",
        add_special_tokens: bool = True,
        field: str = "input",
    ) -> list[int]:
        """Tokens of a prefix and a text, truncated to ``limit`` including special tokens."""
        if self._model.in_chat:
            text = self._in_chat(self._read(text, limit, field), prefix, limit)
            add_special_tokens = False
        else:
            text = self._read(prefix + text, limit, field)
        ids, sequences, _ = self._encoded(text, None, add_special_tokens)
        return self._cut(ids, sequences, limit, field)[0]

    def encode_pair(
        self,
        first: str,
        second: str,
        limit: int | None,
        field: str = "documents",
        *,
        template: PairTemplate | None = None,
    ) -> tuple[list[int], int | None]:
        """Tokens of two texts as the model reads them together, and the number of the first's, if the model
        needs it. If they must be cut, the longer one is cut first; in a chat template the second one."""
        texts = self._read(first, limit, field), self._read(second, limit, field)
        template = template or self._pair_template
        if template is not None:
            return self._in_template(template, *texts, limit, field), None
        if self._model.joins_pairs:
            self._refuse_limit(limit)
            return self.encode("".join(texts), None, field=field), None
        ids, sequences, types = self._encoded(*texts, add_special_tokens=True)
        ids, kept = self._cut(ids, sequences, limit, field)
        if not self._tells_segments:
            return ids, None
        return ids, sum(1 for place in kept if types[place] == 0)

    def _in_template(
        self, template: PairTemplate, query: str, document: str, limit: int | None, field: str
    ) -> list[int]:
        """The tokens of a pair in a chat; the end of the document is cut beyond ``limit``."""
        for _ in range(MAX_CUTS):
            whole = template.text(query, document)
            adds = template.adds_special_tokens
            ids, sequences, _ = self._encoded(whole, None, add_special_tokens=adds)
            if limit is None or len(ids) <= limit:
                break
            document = self._without_last(document, len(ids) - limit, limit)
        return self._cut(ids, sequences, None, field)[0]

    def _without_last(self, document: str, num_tokens: int, limit: int) -> str:
        """A text without its last ``num_tokens`` tokens. RequestError if it has no more than that."""
        if self._backend is None:
            raise RequestError(
                "truncate_prompt_tokens is not supported: the tokenizer of this model has no token offsets.",
                "truncate_prompt_tokens",
            )
        begins = [begin for begin, _ in self._backend.encode(document, add_special_tokens=False).offsets]
        if len(begins) <= num_tokens:
            around = limit + num_tokens - len(begins)
            raise RequestError(
                f"truncate_prompt_tokens must be more than {around}, the tokens around the document, "
                f"got {limit}.",
                "truncate_prompt_tokens",
            )
        return document[: begins[-num_tokens]]

    def first_tokens(self, text: str, max_tokens: int) -> str:
        """A text up to the end of its first ``max_tokens`` tokens."""
        if self._backend is None:
            raise RequestError(
                "max_tokens_per_doc is not supported: the tokenizer of this model has no token offsets.",
                "max_tokens_per_doc",
            )
        text = readable(text[: MAX_TOKEN_CHARS * max_tokens])
        ends = [end for _, end in self._backend.encode(text, add_special_tokens=False).offsets]
        return text if len(ends) <= max_tokens else text[: ends[max_tokens - 1]]

    def _in_chat(self, text: str, prefix: str, limit: int | None) -> str:
        self._refuse_limit(limit)
        messages = [{"role": "system", "content": prefix}] if prefix else []
        messages.append({"role": "user", "content": text})
        return self._tokenizer.chat_text(messages, add_generation_prompt=False)

    def _refuse_limit(self, limit: int | None) -> None:
        if limit is not None:
            raise RequestError(
                "truncate_prompt_tokens is not supported for this model: the end of its inputs must stay.",
                "truncate_prompt_tokens",
            )

    def _read(self, text: str, limit: int | None, field: str) -> str:
        if not self._tokenizer.has_texts:
            raise needs_tokenizer(field, "give inputs as token ids")
        text = readable(text)
        if self._model.lowercases:
            text = text.lower()
        longest = MAX_TOKEN_CHARS * (self._max_model_len if limit is None else limit)
        if len(text) <= longest:
            return text
        if limit is None:
            raise self._too_long(f"a text of {len(text)} characters has more", field)
        return text[:longest]

    def _encoded(
        self, first: str, second: str | None, add_special_tokens: bool
    ) -> tuple[list[int], list[int | None], list[int]]:
        """Token ids; the text index of each, None for special ones; types that distinguish the texts."""
        if self._backend is None:
            found: Any = self._hf(first, second, add_special_tokens=add_special_tokens)
            ids = list(found["input_ids"])
            return ids, [0] * len(ids), list(found.get("token_type_ids", [0] * len(ids)))
        encoding = self._backend.encode(first, second, add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.sequence_ids, encoding.type_ids

    def _cut(
        self, ids: list[int], sequences: list[int | None], limit: int | None, field: str
    ) -> tuple[list[int], list[int]]:
        """The tokens that are kept, and their former positions."""
        places = list(range(len(ids)))
        if not ids:
            raise RequestError(f"{field} must not be empty: it has no tokens.", field)
        if limit is None:
            if len(ids) > self._max_model_len:
                raise self._too_long(f"{len(ids)} tokens > {self._max_model_len} maximum", field)
            return ids, places
        if len(ids) <= limit:
            return ids, places
        counts = [sum(1 for each in sequences if each == number) for number in (0, 1)]
        num_special = len(ids) - sum(counts)
        if num_special >= limit:
            raise RequestError(
                f"truncate_prompt_tokens must be more than the {num_special} special tokens.",
                "truncate_prompt_tokens",
            )
        left = list(longest_first(counts[0], counts[1], limit - num_special))
        kept = []
        for place, sequence in enumerate(sequences):
            if sequence is not None:
                left[sequence] -= 1
            if sequence is None or left[sequence] >= 0:
                kept.append(place)
        return [ids[place] for place in kept], kept

    def _too_long(self, much: str, field: str) -> ContextLengthError:
        return ContextLengthError(
            f"This model's maximum context length is {self._max_model_len} tokens, but {field} is too long: "
            f"{much}. truncate_prompt_tokens cuts it.",
            field,
        )


def longest_first(first: int, second: int, limit: int) -> tuple[int, int]:
    """How many tokens of two texts to keep within ``limit``: the shorter one whole if it takes at most half,
    like ``LongestFirst`` of tokenizers."""
    if first + second <= limit:
        return first, second
    half = limit // 2
    if min(first, second) <= half:
        short = min(first, second)
        return (short, limit - short) if first <= second else (limit - short, short)
    return (half, limit - half) if first <= second else (limit - half, half)
