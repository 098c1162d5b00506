"""More model families, which fewer people use."""

from __future__ import annotations

from tests.tool_parsers.family import Family

_COHERE_PIECES = [
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    '{"tool_name": "bash", "parameters": {',
    "}}",
    "]",
    ", ",
]
COHERE = Family(
    "cohere",
    "{{- '<|START_RESPONSE|>' + content + '<|END_RESPONSE|>' if content }}{{- '<|START_ACTION|>[\\n' }}"
    "{%- for call in calls %}"
    '{{- \'    {"tool_call_id": "\' + loop.index0 | string + \'", "tool_name": "\' + call.name }}'
    "{{- '\", \"parameters\": ' + call.arguments | tojson + '}' }}{{- ',' if not loop.last }}{{- '\\n' }}"
    "{%- endfor %}{{- ']<|END_ACTION|>' }}",
    ["<|START_ACTION|>", "<|END_ACTION|>", '{"tool_name": "bash", "parameters": {', "}}", "]", ", "],
)
INTERNLM = Family(
    "internlm",
    '{{- content }}{%- for call in calls %}{{- \'<|action_start|><|plugin|>\\n{"name": "\' + call.name }}'
    "{{- '\", \"parameters\": ' + call.arguments | tojson + '}<|action_end|>' }}{%- endfor %}",
    [
        *("<|action_start|><|plugin|>", "<|action_start|>", "<|plugin|>", "<|action_end|>", "}}"),
        '{"name": "f", "parameters": {',
    ],
)
GIGACHAT = Family(
    "gigachat3",
    "{{- content }}{%- for call in calls %}{{- '<|message_sep|>\\n\\nfunction call<|role_sep|>\\n' }}"
    "{{- call | tojson }}{%- endfor %}",
    [
        *("<|message_sep|>", "<|message_sep|>\n\n", "function call", "function call<|role_sep|>\n", "}}"),
        *("<|function_call|>", '{"name": "f", "arguments": {', "<|role_sep|>"),
    ],
)
GIGACHAT_31 = Family(
    "gigachat3",
    "{{- content }}{%- for call in calls %}{{- '<|function_call|>' + call | tojson + '<|message_sep|>' }}"
    "{%- endfor %}",
    GIGACHAT.pieces,
)
OLMO3 = Family(
    "olmo3",
    "{{- content + '<function_calls>' }}{%- for call in calls %}{{- '\\n' if not loop.first }}"
    "{{- call.name + '(' }}{%- for key, value in call.arguments.items() %}{{- ', ' if not loop.first }}"
    "{{- key + '=' + value | tojson }}{%- endfor %}{{- ')' }}{%- endfor %}{{- '</function_calls>' }}",
    [
        *("<function_calls>", "</function_calls>", "bash(", "command=", "'", '"', ")", ", ", "true", "\\"),
        *("None", "<function_calls>bash(a=1, b=", "get.time()", "{", "}"),
    ],
)
XLAM = Family(
    "xlam",
    "{{- content + '\\n' if content }}{{- calls | tojson }}",
    [
        *("[TOOL_CALLS]", "[TOOL", "<tool_call>", "</tool_call>", "[", "]", "}}", "```json\n", "```", ", "),
        *('{"name": "bash", "arguments": {', '[{"name": "bash", "arguments": {', '{"a": 1}'),
    ],
)
ERNIE = Family(
    "ernie45",
    "{{- '<response>\\n' + content + '\\n</response>\\n' if content }}{%- for call in calls %}"
    "{{- '\\n\\n' if not loop.first }}{{- '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}"
    "{%- endfor %}",
    ["<tool_call>", "</tool_call>", '{"name": "bash", "arguments": {', "}}"],
)

RARER_FAMILIES = [COHERE, INTERNLM, GIGACHAT, GIGACHAT_31, OLMO3, XLAM, ERNIE]
