"""Model families as the tests know them: what their chat templates write for an answer with tool calls.

Each excerpt is the assistant's part of the family's published template, in our words.
"""

from __future__ import annotations

from tests.tool_parsers.family import CALLS, TOOLS, Call, Family
from tests.tool_parsers.newer_families import NEWER_FAMILIES
from tests.tool_parsers.rarer_families import RARER_FAMILIES

__all__ = ["CALLS", "COMMON_PIECES", "FAMILIES", "HERMES", "TOOLS", "Call", "Family"]

HERMES = Family(
    "hermes",
    "{{- content }}{%- for call in calls %}{{- '\\n' if content or not loop.first }}"
    '{{- \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' + call.arguments | tojson }}'
    "{{- '}\\n</tool_call>' }}{%- endfor %}",
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "bash", "arguments": {',
        '{"arguments": {"b": 1}, "name": "g"}',
        "}}",
    ],
)
QWEN3_CODER = Family(
    "qwen3_coder",
    "{{- content + '\\n' if content }}{%- for call in calls %}"
    "{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}{%- for key, value in call.arguments.items() %}"
    "{{- '<parameter=' + key + '>\\n' }}"
    "{{- value | tojson if value is mapping or (value is sequence and value is not string) "
    "else value | string }}"
    "{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}",
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=bash>",
            "<function=",
            "</function>",
            "<parameter=command>\n",
        ),
        *("\n</parameter>", "<parameter=seconds>", "5", "<tool_call>\n<function=f>\n<parameter=a>"),
    ],
)
GLM45 = Family(
    "glm45",
    "{{- '\\n' + content if content }}{%- for call in calls %}{{- '\\n<tool_call>' + call.name + '\\n' }}"
    "{%- for key, value in call.arguments.items() %}{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
    "{{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}{%- endfor %}"
    "{{- '</tool_call>' }}{%- endfor %}",
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool_call>bash",
            "<arg_key>",
            "command",
            "</arg_key>",
            "<arg_value>",
        ),
        *("</arg_value>", "<tool_call>f\n<arg_key>seconds</arg_key>\n<arg_value>"),
    ],
)
GLM47 = Family(
    "glm47",
    "{{- content }}{%- for call in calls %}{{- '<tool_call>' + call.name }}"
    "{%- for key, value in call.arguments.items() %}{{- '<arg_key>' + key + '</arg_key><arg_value>' }}"
    "{{- value if value is string else value | tojson }}{{- '</arg_value>' }}{%- endfor %}"
    "{{- '</tool_call>' }}{%- endfor %}",
    GLM45.pieces,
)
LLAMA3_JSON = Family(
    "llama3_json",
    "{{- content + '\\n' if content }}{%- for call in calls %}{{- '; ' if not loop.first }}"
    '{{- \'{"name": "\' + call.name + \'", "parameters": \' + call.arguments | tojson + "}" }}{%- endfor %}',
    [
        "<|python_tag|>",
        '{"name": "f", "parameters": {',
        '{"parameters": {}',
        "; ",
        '{"a": 1}',
        "}}",
        '"name": "f"}',
    ],
)
MISTRAL = Family(
    "mistral",
    "{{- content }}{{- '[TOOL_CALLS] [' }}{%- for call in calls %}{{- ', ' if not loop.first }}"
    '{{- (call | tojson)[:-1] + \', "id": "abcdefghi"}\' }}{%- endfor %}{{- "]</s>" }}',
    [
        *(
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "[TOOL",
            '[{"name": "f", "arguments": {',
            "}}",
            "]",
            "bash{",
            "}",
        ),
        *('"id": "a"', "[TOOL_CALLS]g[ARGS]{"),
    ],
    stop="</s>",
)
MISTRAL_ARGS = Family(
    "mistral_args",
    "{{- content }}{%- for call in calls %}{{- '[TOOL_CALLS]' + call.name + '[ARGS]' }}"
    "{{- call.arguments | tojson }}{%- endfor %}{{- '</s>' }}",
    MISTRAL.pieces,
    stop="</s>",
)
MISTRAL_BARE = Family(
    "mistral",
    "{{- content }}{%- for call in calls %}{{- '[TOOL_CALLS]' + call.name }}"
    "{{- call.arguments | tojson }}{%- endfor %}{{- '</s>' }}",
    MISTRAL.pieces,
    stop="</s>",
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "{{- content }}{{- '<｜tool▁calls▁begin｜>' }}{%- for call in calls %}{{- '\\n' if not loop.first }}"
    "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name + '\\n```json\\n' }}"
    "{{- call.arguments | tojson }}{{- '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}"
    "{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}",
    [
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "```json",
            "```",
        ),
        *("<｜tool▁calls▁end｜>", "function", '{"a": ', "}", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"),
    ],
    stop="<｜end▁of▁sentence｜>",
)
DEEPSEEK_V31 = Family(
    "deepseek_v31",
    "{{- content }}{{- '<｜tool▁calls▁begin｜>' }}{%- for call in calls %}"
    "{{- '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' }}"
    "{{- call.arguments | tojson + '<｜tool▁call▁end｜>' }}"
    "{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}",
    DEEPSEEK_V3.pieces,
    stop="<｜end▁of▁sentence｜>",
)
DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "{{- content + '\\n\\n<｜DSML｜function_calls>' }}{%- for call in calls %}"
    "{{- '\\n<｜DSML｜invoke name=\"' + call.name + '\">\\n' }}"
    "{%- for key, value in call.arguments.items() %}"
    "{{- '<｜DSML｜parameter name=\"' + key + '\" string=\"' }}{{- 'true' if value is string else 'false' }}"
    "{{- '\">' }}{{- value if value is string else value | tojson }}"
    "{{- '</｜DSML｜parameter>\\n' }}{%- endfor %}"
    "{{- '</｜DSML｜invoke>' }}{%- endfor %}{{- '\\n</｜DSML｜function_calls>' }}",
    [
        *(
            "<｜DSML｜function_calls>",
            '<｜DSML｜invoke name="f">',
            '<｜DSML｜parameter name="a" string="true">',
        ),
        *(
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
            "</｜DSML｜function_calls>",
            '<｜DSML｜parameter name="',
            "<｜DSML",
        ),
    ],
)
KIMI_K2 = Family(
    "kimi_k2",
    "{{- content }}{{- '<|tool_calls_section_begin|>' }}{%- for call in calls %}"
    "{{- '<|tool_call_begin|>functions.' + call.name + ':' + loop.index0 | string }}"
    "{{- '<|tool_call_argument_begin|>' + call.arguments | tojson + '<|tool_call_end|>' }}{%- endfor %}"
    "{{- '<|tool_calls_section_end|>' }}",
    [
        *(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "functions.f:0",
            "<|tool_call_argument_begin|>",
        ),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", '{"a": ', "}"),
    ],
)
PYTHONIC = Family(
    "pythonic",
    "{{- content + '\\n' if content }}{{- '[' }}{%- for call in calls %}{{- ', ' if not loop.first }}"
    "{{- call.name + '(' }}{%- for key, value in call.arguments.items() %}{{- ', ' if not loop.first }}"
    "{{- key + '=' + value.__repr__() }}{%- endfor %}{{- ')' }}{%- endfor %}{{- ']' }}",
    [
        *(
            "[",
            "bash(",
            "command=",
            "'",
            '"',
            "'''",
            ")",
            "]",
            ", ",
            "[f(a=1, b=",
            "True",
            "\\",
            "<|python_start|>",
        ),
        *("<|python_end|>", "{", "}"),
    ],
)
HARMONY = Family(
    "openai",
    "{{- '<|channel|>final<|message|>' + content + '<|end|><|start|>assistant' if content }}"
    "{%- for call in calls %}{{- '<|start|>assistant' if not loop.first }}"
    "{{- ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' + call.arguments | tojson }}"
    "{{- '<|call|>' }}{%- endfor %}",
    [
        *(
            "<|channel|>",
            "analysis",
            "final",
            "commentary to=functions.f ",
            "<|message|>",
            "<|end|>",
            "<|call|>",
        ),
        *(
            "<|start|>assistant",
            "<|constrain|>json",
            " to=functions.f",
            "{}",
            "<|channel|>analysis<|message|>",
            "<|",
        ),
    ],
    messages=True,
)
JSON = Family(
    "json",
    "{{- calls | tojson }}",
    ['[{"name": "f", "arguments": {', '{"name": "f", "parameters": {', "}}", "]", ", ", '"x"'],
)


def _json_list(name: str, begin: str, end: str, pieces: list[str]) -> Family:
    """A family that writes a list of calls in JSON between two texts."""
    return Family(
        name,
        "{{- content }}{{- '" + begin + "' }}{{- calls | tojson }}{{- '" + end + "' }}",
        [*pieces, '[{"name": "f", "arguments": {', "}}", "]", ", ", '{"name": "bash"'],
    )


GRANITE = _json_list("granite", "<|tool_call|>", "", ["<|tool_call|>", "<|tool_call"])
HUNYUAN = _json_list("hunyuan_a13b", "<tool_calls>", "</tool_calls>", ["<tool_calls>", "</tool_calls>"])
NEMOTRON = _json_list("nemotron_json", "<TOOLCALL>", "</TOOLCALL>", ["<TOOLCALL>", "</TOOLCALL>"])
PHI = _json_list("phi4_mini_json", "functools", "", ["functools[", "functools"])
GRANITE_CODE = Family(
    "granite-20b-fc",
    "{{- content }}{%- for call in calls %}{{- '\n' if not loop.first }}"
    "{{- '<function_call> ' + call | tojson }}{%- endfor %}",
    ["<function_call>", '{"name": "f", "arguments": {', "}}", "<function_call> {"],
)
LONGCAT = Family(
    "longcat",
    "{{- content }}{%- for call in calls %}{{- '\n' if not loop.first }}"
    "{{- '<longcat_tool_call>\n' + call | tojson + '\n</longcat_tool_call>' }}{%- endfor %}",
    ["<longcat_tool_call>", "</longcat_tool_call>", '{"name": "f", "arguments": {', "}}"],
)
APERTUS = Family(
    "apertus",
    "{{- content }}{{- '<|tools_prefix|>[' }}{%- for call in calls %}{{- ', ' if not loop.first }}"
    "{{- '{' + call.name | tojson + ': ' + call.arguments | tojson + '}' }}{%- endfor %}"
    "{{- ']<|tools_suffix|>' }}",
    ["<|tools_prefix|>", "<|tools_suffix|>", '[{"f": {', "}}", "]", ", ", '{"g": 1}', '{"bash": '],
)
MINIMAX = Family(
    "minimax_m2",
    "{{- content }}{{- '\n<minimax:tool_call>\n' }}{%- for call in calls %}"
    "{{- '<invoke name=\"' + call.name + '\">\n' }}{%- for key, value in call.arguments.items() %}"
    "{{- '<parameter name=\"' + key + '\">' }}{{- value if value is string else value | tojson }}"
    "{{- '</parameter>\n' }}{%- endfor %}{{- '</invoke>\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}",
    [
        *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="bash">', "</invoke>"),
        *('<parameter name="command">', '<parameter name="', "</parameter>", "5"),
    ],
)
STEP3 = Family(
    "step3",
    "{{- content }}{{- '<｜tool_calls_begin｜>' }}{%- for call in calls %}"
    "{{- '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"' + call.name + '\">' }}"
    "{%- for key, value in call.arguments.items() %}"
    "{{- '<steptml:parameter name=\"' + key + '\">' }}{{- value if value is string else value | tojson }}"
    "{{- '</steptml:parameter>' }}{%- endfor %}{{- '</steptml:invoke><｜tool_call_end｜>' }}{%- endfor %}"
    "{{- '<｜tool_calls_end｜>' }}",
    [
        *("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
        *("<｜tool_calls_end｜>", '<steptml:invoke name="f">', '<steptml:parameter name="command">'),
        *("</steptml:parameter>", "</steptml:invoke>", "function"),
    ],
)
SEED = Family(
    "seed_oss",
    "{{- content }}{%- for call in calls %}{{- '\n<seed:tool_call>\n<function=' + call.name + '>\n' }}"
    "{%- for key, value in call.arguments.items() %}{{- '<parameter=' + key + '>' }}"
    "{{- value if value is string else value | tojson }}{{- '</parameter>\n' }}{%- endfor %}"
    "{{- '</function>\n</seed:tool_call>' }}{%- endfor %}",
    [
        *("<seed:tool_call>", "</seed:tool_call>", "<function=bash>", "</function>", "<function="),
        *("<parameter=command>", "</parameter>", "<parameter=seconds>", "5"),
    ],
)


def _hy(suffix: str, separator: str, line: str) -> Family:
    """Hunyuan's later formats: with a suffix in tags, a tag after names, and line breaks between tags."""

    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    return Family(
        "hy_v3",
        "{{- content }}{{- '" + tag("tool_calls") + line + "' }}{%- for call in calls %}"
        "{{- '" + tag("tool_call") + "' + call.name + '" + separator + line + "' }}"
        "{%- for key, value in call.arguments.items() %}"
        "{{- '" + tag("arg_key") + "' + key + '" + tag("/arg_key") + line + tag("arg_value") + "' }}"
        "{{- value if value is string else value | tojson }}{{- '" + tag("/arg_value") + line + "' }}"
        "{%- endfor %}{{- '" + tag("/tool_call") + line + "' }}{%- endfor %}"
        "{{- '" + tag("/tool_calls") + "' }}",
        [
            *(tag("tool_calls"), tag("/tool_calls"), tag("tool_call"), tag("/tool_call"), "bash<tool_sep>"),
            *(tag("arg_key"), "command", tag("/arg_key"), tag("arg_value"), tag("/arg_value"), "<tool_sep>"),
        ],
    )


HY3 = _hy("", "<tool_sep>", "\\n")
HY4 = _hy(":opensource", "", "")


def _gemma(name: str, begin: str, end: str, quote: str) -> Family:
    """Gemma's own syntax: bare keys, and strings between tokens."""
    return Family(
        name,
        "{%- macro written(value) -%}{%- if value is string -%}"
        "{{- '" + quote + "' + value + '" + quote + "' -}}"
        "{%- elif value is mapping -%}{{- '{' -}}{%- for key, one in value.items() -%}"
        "{{- ',' if not loop.first -}}{{- key + ':' -}}{{- written(one) -}}{%- endfor -%}{{- '}' -}}"
        "{%- elif value is sequence -%}{{- '[' -}}{%- for one in value -%}"
        "{{- ',' if not loop.first -}}{{- written(one) -}}{%- endfor -%}{{- ']' -}}"
        "{%- else -%}{{- value | tojson -}}{%- endif -%}{%- endmacro -%}"
        "{{- content }}{%- for call in calls %}{{- '" + begin + "call:' + call.name }}"
        "{{- written(call.arguments) }}{{- '" + end + "' }}{%- endfor %}",
        [
            *(begin, end, quote, "call:f{", "call:", "k:", "5", "true", "}", "]", "l:[1,"),
            *(begin + "call:bash{command:" + quote, '{"name": "f", "arguments": {}}'),
        ],
    )


GEMMA4 = _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
KIMI_K3 = Family(
    "kimi_k3",
    "{{- '<|open|>response<|sep|>' + content + '<|close|>response<|sep|>' if content }}"
    "{{- '<|open|>tools<|sep|>' }}{%- for call in calls %}"
    "{{- '<|open|>call tool=\"' + call.name + '\" index=\"' + loop.index | string + '\"<|sep|>' }}"
    "{%- for key, value in call.arguments.items() %}"
    "{{- '<|open|>argument key=\"' + key + '\" type=\"' }}"
    "{{- 'string' if value is string else 'null' if value is none else 'boolean' if value is boolean "
    "else 'object' if value is mapping else 'array' if value is sequence else 'number' }}"
    "{{- '\"<|sep|>' }}{{- value if value is string else value | tojson }}"
    "{{- '<|close|>argument<|sep|>' }}{%- endfor %}{{- '<|close|>call<|sep|>' }}{%- endfor %}"
    "{{- '<|close|>tools<|sep|>' }}",
    [
        *("<|open|>tools<|sep|>", '<|open|>call tool="f" index="1"<|sep|>', "<|close|>call<|sep|>"),
        *('<|open|>argument key="command" type="string"<|sep|>', "<|close|>argument<|sep|>"),
        *('<|open|>argument key="', "<|close|>tools<|sep|>", "<|open|>", "<|sep|>"),
    ],
)
MINIMAX_M3 = Family(
    "minimax_m3",
    "{%- set ns = ']<]minimax[>[' -%}"
    "{%- macro written(value) -%}{%- if value is mapping -%}{%- for key, one in value.items() -%}"
    "{{- ns + '<' + key + '>' -}}{{- written(one) -}}{{- ns + '</' + key + '>' -}}{%- endfor -%}"
    "{%- elif value is string -%}{{- value -}}{%- elif value is sequence -%}{%- for one in value -%}"
    "{{- ns + '<item>' -}}{{- written(one) -}}{{- ns + '</item>' -}}{%- endfor -%}"
    "{%- else -%}{{- value | tojson -}}{%- endif -%}{%- endmacro -%}"
    "{{- content }}{{- ns + '<tool_call>\n' }}{%- for call in calls %}"
    "{{- ns + '<invoke name=\"' + call.name + '\">' }}{{- written(call.arguments) }}"
    "{{- ns + '</invoke>\n' }}{%- endfor %}{{- ns + '</tool_call>' }}",
    [
        *("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>", ']<]minimax[>[<invoke name="f">'),
        *("]<]minimax[>[</invoke>", "]<]minimax[>[<command>", "]<]minimax[>[</command>", "]<]minimax[>["),
        *("]<]minimax[>[<names>", "]<]minimax[>[<item>", "]<]minimax[>[</item>", "]<]minimax[>[</names>"),
    ],
    guesses=True,
)
LFM2 = Family(
    "lfm2",
    PYTHONIC.template.replace("content + '\\n' if content", "content")
    .replace("'['", "'<|tool_call_start|>['")
    .replace("']'", "']<|tool_call_end|>'"),
    ["<|tool_call_start|>", "<|tool_call_end|>", *PYTHONIC.pieces],
)

FAMILIES = [
    *(GRANITE, GRANITE_CODE, HUNYUAN, NEMOTRON, PHI, LONGCAT, APERTUS, MINIMAX, STEP3, SEED, HY3, HY4),
    *(GEMMA4, FUNCTION_GEMMA, KIMI_K3, MINIMAX_M3, LFM2),
    *(HERMES, QWEN3_CODER, GLM45, GLM47, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, MISTRAL_BARE, DEEPSEEK_V3),
    *(DEEPSEEK_V31, DEEPSEEK_V32, KIMI_K2, PYTHONIC, HARMONY, JSON),
    *RARER_FAMILIES,
    *NEWER_FAMILIES,
]
COMMON_PIECES = [
    "\n",
    " ",
    "{",
    "}",
    '"',
    "\\",
    "<",
    "text",
    ",",
    "é",
    "😀",
    "[",
    "]",
    ":",
    "<think>",
    "</think>",
]
