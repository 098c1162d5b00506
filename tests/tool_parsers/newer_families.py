"""Families of 2026: what their chat templates write for an answer with tool calls, in our words."""

from __future__ import annotations

from tests.tool_parsers.family import Family

_PLAIN = "value if value is string else value | tojson"


def _spelled(
    name: str, pieces: tuple[str, ...], parameter: str, section: tuple[str, str] = ("", "")
) -> Family:
    """A format with elements: ``pieces`` are the texts before a call's name, after it and at the call's end,
    ``parameter`` is one parameter, with KEY and VALUE in their places."""
    before, behind, end = pieces
    written = parameter.replace("KEY", "' + key + '").replace("VALUE", f"' + ({_PLAIN}) + '")
    return Family(
        name,
        "{{- content + '" + section[0] + "' }}{%- for call in calls %}{{- '" + before + "' + call.name + '"
        + behind + "' }}{%- for key, value in call.arguments.items() %}{{- '" + written + "' }}{%- endfor %}"
        "{{- '" + end + "' }}{%- endfor %}{{- '" + section[1] + "' }}",
        [each for each in (*section, *pieces, *parameter.split("KEY"), "command", "5") if each],
    )  # fmt: skip


def _dsml(name: str, mark: str, section: str) -> Family:
    flag = "' + ('true' if value is string else 'false') + '"
    family = _spelled(
        name,
        (f'\n<{mark}invoke name="', '">\n', f"</{mark}invoke>"),
        f'<{mark}parameter name="KEY" string="FLAG">VALUE</{mark}parameter>\n',
        (f"<{mark}{section}>", f"\n</{mark}{section}>"),
    )
    return Family(name, family.template.replace("FLAG", flag), [p for p in family.pieces if "FLAG" not in p])


MIMO = _spelled(
    "mimo",
    ("\n<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
    "<parameter=KEY>VALUE</parameter>\n",
)
DSML_41 = _dsml("deepseek_v41", "｜DSML｜ ", "calls")
GIGACHAT_35 = _dsml("gigachat35", "｜GCML｜", "tool_calls")
DOTS = _spelled(
    "dots",
    ('<invoke name="', '">\n', "</invoke>\n"),
    '<parameter name="KEY">VALUE</parameter>\n',
    ("<dots_function_call>\n", "</dots_function_call>"),
)
MINICPM5 = _spelled(
    "minicpm5", ('<function name="', '">', "</function>"), '<param name="KEY"><![CDATA[VALUE]]></param>'
)
HORIZON = _spelled(
    "k2_horizon",
    ("<ifm|tool_call>", "\n", "</ifm|tool_call>\n"),
    "<ifm|arg_key>KEY</ifm|arg_key><ifm|arg_value>VALUE</ifm|arg_value>\n",
    ("<ifm|tool_calls>\n", "</ifm|tool_calls>"),
)
SOLAR = _spelled(
    "solar_open2",
    ("<|tool_call:start|>", "\n", "<|tool_call:end|>\n"),
    "<|tool_arg:start|>KEY<|tool_arg:value|>VALUE<|tool_arg:end|>\n",
)
PLAMO3 = Family(
    "plamo3",
    "{{- content + '<|plamo:begin_tool_requests:plamo|>' }}{%- for call in calls %}"
    "{{- '<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>' + call.name }}"
    "{{- '<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json' }}"
    "{{- '<|plamo:msg|>' + call.arguments | tojson + '<|plamo:end_tool_arguments:plamo|>' }}"
    "{{- '<|plamo:end_tool_request:plamo|>' }}{%- endfor %}{{- '<|plamo:end_tool_requests:plamo|>' }}",
    [
        *("<|plamo:begin_tool_requests:plamo|>", "<|plamo:begin_tool_request:plamo|>", "{", "}"),
        *("<|plamo:begin_tool_name:plamo|>", "<|plamo:end_tool_name:plamo|>", "<|plamo:msg|>"),
        *("<|plamo:end_tool_request:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
    ],
)

MUSE = Family(
    "muse",
    "{{- ' to=user<|message|>' + content + '<|eom|><|start|>assistant' if content }}{%- for call in calls %}"
    "{{- '<|start|>assistant' if not loop.first }}{{- ' to=' + call.name + '<|message|>\n' }}"
    "{{- '<atem:function_calls>\n<atem:invoke name=\"' + call.name + '\">\n' }}"
    "{%- for key, value in call.arguments.items() %}{{- '<atem:parameter name=\"' + key + '\">' }}"
    "{{- (" + _PLAIN + ") + '</atem:parameter>\n' }}{%- endfor %}"
    "{{- '</atem:invoke>\n</atem:function_calls><|eom|>' }}{%- endfor %}",
    [
        *("<|start|>assistant", " to=self", " to=user", " to=f", "<|message|>", "<|eom|>", "<|eot|>"),
        *("<atem:function_calls>", "</atem:function_calls>", '<atem:invoke name="', '">', "</atem:invoke>"),
        *('<atem:parameter name="', "</atem:parameter>", "command", "5", "<|"),
    ],
    messages=True,
)
INKLING = Family(
    "inkling",
    "{{- '<|content_text|>' + content + '<|end_message|><|message_model|>' if content }}"
    "{%- for call in calls %}{{- '<|message_model|>' if not loop.first }}"
    "{{- '<|content_invoke_tool_json|>{\"name\": ' + call.name | tojson + ', \"args\": ' }}"
    "{{- call.arguments | tojson + '}<|end_message|>' }}{%- endfor %}",
    [
        *("<|message_model|>", "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"),
        *("<|end_message|>", "<|content_model_end_sampling|>", '{"name": "f", "args": {}}', "{", "}", "<|"),
    ],
    messages=True,
)

NEWER_FAMILIES = [MUSE, INKLING, MIMO, DSML_41, GIGACHAT_35, DOTS, MINICPM5, HORIZON, SOLAR, PLAMO3]
