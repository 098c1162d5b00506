"""The formats in which models write calls and reasoning, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.reasoning.think import ThinkTags
from engine.tool_parsers.base import PlainParser, ReplyParser
from engine.tool_parsers.call_ids import CallIds, KimiIds, MistralIds
from engine.tool_parsers.deepseek import (
    DEEPSEEK_SECTION,
    KIMI_SECTION,
    DeepSeekToolParser,
    KimiToolParser,
    PlamoToolParser,
)
from engine.tool_parsers.forced import JSON_CALLS, CallSyntax
from engine.tool_parsers.hermes import HermesToolParser
from engine.tool_parsers.json_calls import (
    PYTHON_TAG,
    JsonToolParser,
    Llama3JsonToolParser,
    XlamToolParser,
)
from engine.tool_parsers.messages import harmony, inkling, muse
from engine.tool_parsers.messages.formats import MESSAGE_FORMATS
from engine.tool_parsers.mistral import ARGS, OPEN, MistralToolParser
from engine.tool_parsers.parameters import Tool
from engine.tool_parsers.pythonic import LfmToolParser, OlmoToolParser, PythonicToolParser
from engine.tool_parsers.tagged.dsml import (
    GCML_MARK,
    INVOKE,
    MARK,
    SECTIONS,
    Dsml41ToolParser,
    DsmlToolParser,
    GcmlToolParser,
)
from engine.tool_parsers.tagged.framed import (
    COHERE,
    COHERE_ANSWER,
    ERNIE,
    ERNIE_ANSWER,
    HUNYUAN,
    HUNYUAN_ANSWER,
    CohereToolParser,
    ErnieToolParser,
    HunyuanToolParser,
)
from engine.tool_parsers.tagged.gemma4 import FunctionGemmaToolParser, GemmaToolParser
from engine.tool_parsers.tagged.glm import GlmToolParser, HorizonToolParser, HyToolParser, SolarToolParser
from engine.tool_parsers.tagged.invoke import (
    DotsToolParser,
    MiniCpmToolParser,
    MiniMaxToolParser,
    StepToolParser,
)
from engine.tool_parsers.tagged.json_between import (
    ApertusToolParser,
    GigaChatToolParser,
    GraniteCodeToolParser,
    GraniteToolParser,
    InternLmToolParser,
    LongCatToolParser,
    NemotronToolParser,
    PhiToolParser,
)
from engine.tool_parsers.tagged.kimi_k3 import KimiK3ToolParser, ResponseChannel
from engine.tool_parsers.tagged.minimax_m3 import MiniMaxM3ToolParser
from engine.tool_parsers.tagged.qwen3_coder import MimoToolParser, Qwen3CoderToolParser, SeedToolParser
from engine.tool_parsers.text_syntax import CODER, DSML, GLM, MINIMAX, SEED, STEP, TextSyntax

ToolParserFactory = Callable[[Sequence[Tool]], ReplyParser]
"""Makes the parser of one response that may call these tools."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    make: ToolParserFactory
    signs: tuple[str, ...] = ()
    """Texts that all occur in a chat template of this format, while templates of earlier formats in the list
    lack at least one."""
    tags: tuple[str, ...] = ()
    """Texts that are special tokens in some tokenizers: the response's text must include them."""
    ends_thinking: tuple[str, ...] = ()
    """Tags that only calls have; they end a reasoning section that was not closed."""
    syntax: CallSyntax | None = None
    """The syntax with which a call can be forced; None if calls are not JSON."""
    begins_call: tuple[str, ...] = ()
    """Texts that a call may begin with, and that reasoning may contain, too."""
    make_plain: Callable[[], ReplyParser] = PlainParser
    """Makes the parser of a response that may not contain calls."""
    text_syntax: TextSyntax | None = None
    """How a call with a single text argument is written; None if that is in quotes, or unknown."""
    call_ids: CallIds | None = None
    """The ids that its templates accept; None if they accept any."""
    frame: tuple[str, ...] = ()
    """Other texts that are special tokens in some tokenizers, also found in responses without calls."""


_XML_CALL = ("<tool_call>", "</tool_call>")
_HERMES_CALL = CallSyntax('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n")
_DEEPSEEK_TAGS = (
    DEEPSEEK_SECTION,
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_DEEPSEEK_BEGINS = (DEEPSEEK_SECTION, *DeepSeekToolParser.tags.call.texts)
_KIMI_TAGS = (
    KIMI_SECTION,
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


def _listed(begin: str, end: str, before: str = '{"name": "{name}", "arguments": ') -> CallSyntax:
    """The syntax of a list of JSON objects between two texts."""
    return CallSyntax(before, "}", begin=begin, between=", ", end=end)


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "openai": ToolFormat(
        harmony.HarmonyParser, (harmony.CHANNEL, harmony.MESSAGE), MESSAGE_FORMATS["openai"].tags
    ),
    "muse": ToolFormat(muse.MuseParser, ("<atem:function_calls>", "<|eom|>"), MESSAGE_FORMATS["muse"].tags),
    "inkling": ToolFormat(inkling.InklingParser, (inkling.CALL,), MESSAGE_FORMATS["inkling"].tags),
    "gemma4": ToolFormat(
        GemmaToolParser,
        ("<|tool_call>", "<tool_call|>"),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        ("<|tool_call>",),
    ),
    "functiongemma": ToolFormat(
        FunctionGemmaToolParser,
        ("<start_function_call>",),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        ("<start_function_call>",),
    ),
    "minimax_m2": ToolFormat(
        MiniMaxToolParser,
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ("<minimax:tool_call>",),
        text_syntax=MINIMAX,
    ),
    "step3": ToolFormat(
        StepToolParser,
        ("<steptml:invoke",),
        (*StepToolParser.tags.sections, "<｜tool_call_end｜>", "<｜tool_sep｜>", "<｜tool_calls_end｜>"),
        StepToolParser.tags.sections,
        text_syntax=STEP,
    ),
    "apertus": ToolFormat(
        ApertusToolParser,
        ("<|tools_prefix|>",),
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        ("<|tools_prefix|>",),
        _listed("<|tools_prefix|>[", "]<|tools_suffix|>", before='{"{name}": '),
    ),
    "cohere": ToolFormat(
        CohereToolParser,
        ("<|START_ACTION|>",),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        ("<|START_ACTION|>",),
        CallSyntax(
            '    {"tool_call_id": "{number}", "tool_name": "{name}", "parameters": ',
            *("}", "<|START_ACTION|>[\n", ",\n", "\n]<|END_ACTION|>"),
        ),
        make_plain=COHERE_ANSWER,
        frame=(*COHERE.begins, *COHERE.ends),
    ),
    "internlm": ToolFormat(
        InternLmToolParser,
        ("<|action_start|>", "<|plugin|>"),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        InternLmToolParser.opening.texts,
        CallSyntax('<|action_start|><|plugin|>\n{"name": "{name}", "parameters": ', "}<|action_end|>"),
    ),
    "gigachat3": ToolFormat(
        GigaChatToolParser,
        ("<|role_sep|>", "<|message_sep|>"),
        ("<|function_call|>", "<|role_sep|>"),
        GigaChatToolParser.opening.texts,
        frame=("<|message_sep|>",),
    ),
    "olmo3": ToolFormat(
        OlmoToolParser,
        OlmoToolParser.opening.texts,
        ("<function_calls>", "</function_calls>"),
        begins_call=OlmoToolParser.opening.texts,
    ),
    "granite": ToolFormat(
        GraniteToolParser,
        ("<|tool_call|>",),
        ("<|tool_call|>",),
        ("<|tool_call|>",),
        _listed("<|tool_call|>[", "]"),
    ),
    "granite-20b-fc": ToolFormat(
        GraniteCodeToolParser,
        ("<function_call>",),
        ("<function_call>",),
        syntax=CallSyntax('<function_call> {"name": "{name}", "arguments": ', "}", between="\n"),
    ),
    "nemotron_json": ToolFormat(
        NemotronToolParser,
        ("<TOOLCALL>",),
        ("<TOOLCALL>", "</TOOLCALL>"),
        syntax=_listed("<TOOLCALL>[", "]</TOOLCALL>"),
    ),
    "longcat": ToolFormat(
        LongCatToolParser,
        ("<longcat_tool_call>",),
        ("<longcat_tool_call>", "</longcat_tool_call>"),
        begins_call=("<longcat_tool_call>",),
        syntax=CallSyntax(
            '<longcat_tool_call>\n{"name": "{name}", "arguments": ', "}\n</longcat_tool_call>", between="\n"
        ),
    ),
    "lfm2": ToolFormat(
        LfmToolParser,
        (LfmToolParser.start,),
        (LfmToolParser.start, "<|tool_call_end|>"),
        (LfmToolParser.start,),
    ),
    "seed_oss": ToolFormat(
        SeedToolParser,
        ("<seed:tool_call>",),
        ("<seed:tool_call>", "</seed:tool_call>"),
        ("<seed:tool_call>",),
        text_syntax=SEED,
    ),
    "hy_v3": ToolFormat(
        HyToolParser,
        ("<tool_calls", "<arg_key"),
        (*HyToolParser.raw_end.texts, *HyToolParser.section.texts, *HyToolParser.separator.texts),
        HyToolParser.section.texts,
    ),
    "hunyuan_a13b": ToolFormat(
        HunyuanToolParser,
        ("<tool_calls>",),
        ("<tool_calls>", "</tool_calls>"),
        begins_call=("<tool_calls>",),
        syntax=_listed("<tool_calls>[", "]</tool_calls>"),
        make_plain=HUNYUAN_ANSWER,
        frame=(*HUNYUAN.begins, *HUNYUAN.ends),
    ),
    "deepseek_v41": ToolFormat(
        Dsml41ToolParser,
        (Dsml41ToolParser.tags.sections[0],),
        (MARK,),
        (*Dsml41ToolParser.tags.sections, Dsml41ToolParser.tags.invoke),
    ),
    "gigachat35": ToolFormat(
        GcmlToolParser,
        (GCML_MARK,),
        (GCML_MARK,),
        (*GcmlToolParser.tags.sections, GcmlToolParser.tags.invoke),
    ),
    "dots": ToolFormat(
        DotsToolParser,
        DotsToolParser.tags.sections,
        (*DotsToolParser.tags.sections, *DotsToolParser.tags.section_ends),
        DotsToolParser.tags.sections,
    ),
    "k2_horizon": ToolFormat(
        HorizonToolParser,
        HorizonToolParser.section.texts,
        (
            *(*HorizonToolParser.raw_end.texts, *HorizonToolParser.section.texts),
            *(*HorizonToolParser.key.texts, *HorizonToolParser.value.texts),
        ),
        HorizonToolParser.section.texts,
    ),
    "solar_open2": ToolFormat(
        SolarToolParser,
        SolarToolParser.opening.texts,
        (*SolarToolParser.raw_end.texts, *SolarToolParser.key.texts, *SolarToolParser.value.texts),
        begins_call=SolarToolParser.opening.texts,
    ),
    "plamo3": ToolFormat(
        PlamoToolParser,
        PlamoToolParser.tags.begin.texts,
        (*PlamoToolParser.tags.begin.texts, *PlamoToolParser.raw_end.texts),
        PlamoToolParser.tags.begin.texts,
    ),
    "minicpm5": ToolFormat(
        MiniCpmToolParser,
        ("<function name=", "<param name="),
        begins_call=(MiniCpmToolParser.tags.invoke,),
    ),
    "deepseek_v32": ToolFormat(DsmlToolParser, (MARK,), (MARK,), (*SECTIONS, INVOKE), text_syntax=DSML),
    "deepseek_v3": ToolFormat(
        DeepSeekToolParser,
        (DEEPSEEK_SECTION, "```json"),
        _DEEPSEEK_TAGS,
        _DEEPSEEK_BEGINS,
        CallSyntax(
            before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            after="\n```<｜tool▁call▁end｜>",
            begin=DEEPSEEK_SECTION,
            between="\n",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v31": ToolFormat(
        DeepSeekToolParser,
        (DEEPSEEK_SECTION,),
        _DEEPSEEK_TAGS,
        _DEEPSEEK_BEGINS,
        CallSyntax(
            before="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            after="<｜tool▁call▁end｜>",
            begin=DEEPSEEK_SECTION,
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    "kimi_k2": ToolFormat(
        KimiToolParser,
        (KIMI_SECTION,),
        _KIMI_TAGS,
        (KIMI_SECTION, *KimiToolParser.tags.call.texts),
        call_ids=KimiIds(),
    ),
    "kimi_k3": ToolFormat(
        KimiK3ToolParser,
        ("<|open|>", "<|sep|>"),
        KimiK3ToolParser.tags.sections,
        KimiK3ToolParser.tags.sections,
        make_plain=ResponseChannel,
        frame=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "minimax_m3": ToolFormat(
        MiniMaxM3ToolParser,
        ("]<]minimax[>[",),
        ("]<]minimax[>[",),
        MiniMaxM3ToolParser.tags.sections,
    ),
    "mistral_args": ToolFormat(
        MistralToolParser,
        (OPEN, ARGS),
        (OPEN, ARGS),
        (OPEN,),
        CallSyntax(before=OPEN + "{name}" + ARGS, after=""),
        call_ids=MistralIds(),
    ),
    "mistral": ToolFormat(
        MistralToolParser,
        (OPEN,),
        (OPEN, ARGS),
        (OPEN,),
        CallSyntax('{"name": "{name}", "arguments": ', "}", begin=OPEN + " [", between=", ", end="]"),
        call_ids=MistralIds(),
    ),
    "ernie45": ToolFormat(
        ErnieToolParser,
        ("<tool_call>", "<response>"),
        _XML_CALL,
        begins_call=("<tool_call>",),
        syntax=replace(_HERMES_CALL, between="\n\n"),
        make_plain=ERNIE_ANSWER,
        frame=(*ERNIE.begins, *ERNIE.ends),
    ),
    "glm45": ToolFormat(
        GlmToolParser,
        ("<arg_key>",),
        (*_XML_CALL, "<arg_key>", "<arg_value>"),
        begins_call=GlmToolParser.opening.texts,
        text_syntax=GLM,
    ),
    "qwen3_coder": ToolFormat(
        Qwen3CoderToolParser,
        ("<tool_call>", "<function=", "<parameter="),
        _XML_CALL,
        begins_call=Qwen3CoderToolParser.opening.texts,
        text_syntax=CODER,
    ),
    "mimo": ToolFormat(MimoToolParser, tags=_XML_CALL, begins_call=MimoToolParser.opening.texts),
    "hermes": ToolFormat(
        HermesToolParser,
        ("<tool_call>",),
        _XML_CALL,
        begins_call=HermesToolParser.opening.texts,
        syntax=_HERMES_CALL,
    ),
    "pythonic": ToolFormat(
        PythonicToolParser,
        ("[func_name1(",),
        ("<|python_start|>", "<|python_end|>"),
        begins_call=PythonicToolParser.opening.texts,
    ),
    "llama3_json": ToolFormat(
        Llama3JsonToolParser,
        ('"parameters": ', "ipython"),
        (PYTHON_TAG,),
        begins_call=Llama3JsonToolParser.opening.texts,
        syntax=CallSyntax('{"name": "{name}", "parameters": ', "}", between="; "),
    ),
    "xlam": ToolFormat(XlamToolParser, tags=_XML_CALL, begins_call=("<tool_call>",), syntax=JSON_CALLS),
    "phi4_mini_json": ToolFormat(PhiToolParser, syntax=_listed("functools[", "]")),
    "json": ToolFormat(JsonToolParser, syntax=JSON_CALLS),
}
"""Formats by name, in the order in which ``auto`` tries them."""

THINK_TAGS: Mapping[str, ThinkTags] = {
    "think": ThinkTags("<think>", "</think>"),
    "deepseek_r1": ThinkTags("<think>", "</think>", assumed=True),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
    "gemma4": ThinkTags("<|channel>thought", "<channel|>", bare="thought\n"),
    "minimax_m3": ThinkTags("<mm:think>", "</mm:think>"),
    "kimi_k3": ThinkTags("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "apertus": ThinkTags("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere": ThinkTags("<|START_THINKING|>", "<|END_THINKING|>", make_answer=COHERE_ANSWER),
    "ernie45": ThinkTags("<think>", "</think>", make_answer=ERNIE_ANSWER),
    "hunyuan_a13b": ThinkTags("<think>", "</think>", make_answer=HUNYUAN_ANSWER),
    "solar_open2": ThinkTags("<|think:start|>", "<|think:end|>"),
    "plamo3": ThinkTags("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", assumed=True),
    "k2_horizon": ThinkTags(
        "<ifm|think>",
        "</ifm|think>",
        efforts=tuple((f"<ifm|think_{name}>", f"</ifm|think_{name}>") for name in ("faster", "fast")),
    ),
    "granite": ThinkTags(
        "Here is my thought process:",
        "Here is my response:",
        bare="Here's my thought process:",
        other_ends=("Here's my response:",),
    ),
    "hy_opensource": ThinkTags("<think:opensource>", "</think:opensource>"),
}
"""The tags of reasoning sections, by name."""

TOOL_ALIASES = {
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "glm47": "glm45",
    "poolside_v1": "glm45",
    "hy_v4": "hy_v3",
    "jamba": "hunyuan_a13b",
    "granite4": "hermes",
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere"),
    **dict.fromkeys(("step3p5", "nemotron_v3", "granite_thinking"), "qwen3_coder"),
    "ling3": "glm45",
    "deepseek_v4": "deepseek_v32",
    **dict.fromkeys(("harmony", "gpt_oss"), "openai"),
    **dict.fromkeys(("muse_glimmer", "muse_spark"), "muse"),
}
REASONING_ALIASES = {
    **dict.fromkeys(("qwen3", "glm45", "glm47", "deepseek_v3", "deepseek_v31", "kimi_k2"), "think"),
    **dict.fromkeys(("minimax_m2", "hy_v3", "step3", "step3p5", "mimo"), "think"),
    **dict.fromkeys(("nemotron_v3", "olmo3", "longcat", "granite_thinking", "dots", "minicpm5"), "think"),
    **dict.fromkeys(("deepseek_v4", "deepseek_v41", "poolside_v1", "holo2", "ling3", "kolibri1"), "think"),
    "hy_v4": "hy_opensource",
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere"),
    **dict.fromkeys(("openai_gptoss", "harmony", "gpt_oss"), "openai"),
    **dict.fromkeys(("muse_glimmer", "muse_spark"), "muse"),
}
_OWN_CHOICES = ("auto", "none")
TOOL_CALL_PARSERS = (*_OWN_CHOICES, *sorted([*TOOL_FORMATS, *TOOL_ALIASES]))
"""Values of ``--tool-call-parser``, besides plug-ins."""
REASONING_PARSERS = (*_OWN_CHOICES, *sorted([*THINK_TAGS, *REASONING_ALIASES, *MESSAGE_FORMATS]))
"""Values of ``--reasoning-parser``."""
