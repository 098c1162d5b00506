"""Promises about models' errors in calls: each slip in each format, whole and cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.tool_parsers import ParsedReply
from engine.tool_parsers.formats import ReplyFormat

WRITE = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "write", "parameters": WRITE}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
Calls = list[tuple[str, dict[str, Any] | None]]
"""Names, and arguments; None for arguments that the reply's end cut off."""

D = "｜DSML｜"
A: Calls = [("write", {"path": "a"})]
TWO: Calls = [("write", {"path": "a"}), ("write", {"path": "b"})]
OBJECT = '{"path": "a"}'


def hermes(*arguments: str, name: str = "write") -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for text in arguments
    )


def qwen(*bodies: str, name: str = "write") -> str:
    return "\n".join(f"<tool_call>\n<function={name}>\n{b}</function>\n</tool_call>" for b in bodies)


def qwen_value(value: str, key: str = "path", end: str = "\n</parameter>\n") -> str:
    return f"<parameter={key}>\n{value}{end}"


def glm(*bodies: str, name: str = "write") -> str:
    return "\n".join(f"<tool_call>{name}\n{b}</tool_call>" for b in bodies)


def glm_value(value: str, key: str = "path", end: str = "</arg_value>\n") -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}{end}"


def dsml(*bodies: str, name: str = "write") -> str:
    calls = "".join(f'<{D}invoke name="{name}">\n{b}</{D}invoke>\n' for b in bodies)
    return f"<{D}function_calls>\n{calls}</{D}function_calls>"


def dsml_value(value: str, key: str = "path", end: str = f"</{D}parameter>\n", string: str = "true") -> str:
    return f'<{D}parameter name="{key}" string="{string}">{value}{end}'


def v3_call(arguments: str, name: str = "write") -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31_call(arguments: str, name: str = "write") -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def deepseek(*calls: str, between: str = "") -> str:
    return "<｜tool▁calls▁begin｜>" + between.join(calls) + "<｜tool▁calls▁end｜>"


def kimi_call(arguments: str, name: str = "functions.write:0") -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def kimi(*calls: str, between: str = "") -> str:
    return "<|tool_calls_section_begin|>" + between.join(calls) + "<|tool_calls_section_end|>"


def harmony(arguments: str, name: str = "functions.write", end: str = "<|call|>") -> str:
    return f"<|start|>assistant<|channel|>commentary to={name} <|constrain|>json<|message|>{arguments}{end}"


def invalid(raw: str, **said: str) -> dict[str, Any]:
    return {**said, "INVALID_JSON": raw}


BROKEN = "not json"
NAMED = f'{{"name": "write", "arguments": {OBJECT}}}'
LLAMA = f'{{"name": "write", "parameters": {OBJECT}}}'
OTHER = '{"path": "b"}'
NAMED_B, LLAMA_B = NAMED.replace(OBJECT, OTHER), LLAMA.replace(OBJECT, OTHER)
STOP: Calls = [("stop", {})]
CUT: Calls = [("write", None)]
BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SECTION_END = "<｜tool▁calls▁end｜>"
NESTED = '{"steps": [{"name": "write", "parameters": {}}]}'
BOB = '{"name": "Bob", "parameters": {"age": 3}}'
NEARLY_JSON: list[tuple[str, dict[str, Any]]] = [
    ('{"path": "a\nb\tc"}', {"path": "a\nb\tc"}),
    (r'{"path": "C:\d+\Users"}', {"path": r"C:\d+\Users"}),
    ('{"path": "a",}', {"path": "a"}),
    ('{"path": ["a", 1, ] , }', {"path": ["a", 1]}),
    ('{"path": True, "text": None}', {"path": True, "text": None}),
]
SLIPS: dict[str, list[tuple[str, str, str, Calls]]] = {
    "missing end tag": [
        ("hermes", hermes(OBJECT).removesuffix("\n</tool_call>"), "", A),
        ("hermes", hermes(OBJECT).removesuffix("}\n</tool_call>"), "", A),
        ("hermes", hermes(OBJECT).replace("\n</tool_call>", "\n") + hermes(OTHER), "", TWO),
        ("hermes", hermes('{"path": "a"').replace("}", ""), "", A),
        ("qwen3_coder", qwen(qwen_value("a", end="\n")), "", A),
        ("qwen3_coder", qwen(qwen_value("a", end="")), "", A),
        (
            "qwen3_coder",
            qwen(qwen_value("a", end="\n") + qwen_value("b", "text")),
            "",
            [("write", {"path": "a", "text": "b"})],
        ),
        (
            "qwen3_coder",
            qwen(qwen_value("a", end="") + qwen_value("b", "text", end="\n")),
            "",
            [("write", {"path": "a", "text": "b"})],
        ),
        ("qwen3_coder", qwen(qwen_value("a")).replace("</function>\n", ""), "", A),
        ("qwen3_coder", qwen(qwen_value("a")).removesuffix("\n</tool_call>"), "", A),
        ("qwen3_coder", qwen(qwen_value("a", end="\n"), qwen_value("b")), "", TWO),
        (
            "qwen3_coder",
            qwen(qwen_value("a")).removesuffix("\n</tool_call>") + qwen(qwen_value("b")),
            "",
            TWO,
        ),
        ("glm45", glm(glm_value("a", end="\n")), "", A),
        ("glm45", glm(glm_value("a", end="")), "", A),
        (
            "glm45",
            glm(glm_value("a", end="\n") + glm_value("b", "text")),
            "",
            [("write", {"path": "a", "text": "b"})],
        ),
        ("glm45", glm(glm_value("a").replace("</arg_key>", "")), "", A),
        ("glm45", glm(glm_value("a").replace("<arg_value>", "")), "", A),
        ("glm45", glm(glm_value("a")).removesuffix("</tool_call>") + glm(glm_value("b")), "", TWO),
        ("deepseek_v32", dsml(dsml_value("a", end="")), "", A),
        (
            "deepseek_v32",
            dsml(dsml_value("a", end="\n") + dsml_value("b", "text")),
            "",
            [("write", {"path": "a", "text": "b"})],
        ),
        ("deepseek_v32", dsml(dsml_value("a")).replace(f"</{D}invoke>\n", ""), "", A),
        (
            "deepseek_v32",
            dsml(dsml_value("a"), dsml_value("b")).replace(f"</{D}invoke>\n", "", 1),
            "",
            TWO,
        ),
        ("deepseek_v32", dsml(dsml_value("a")).removesuffix(f"</{D}function_calls>"), "", A),
        ("deepseek_v3", deepseek(v3_call(OBJECT).replace("\n```<", "<")), "", A),
        ("deepseek_v31", deepseek(v31_call(OBJECT)).replace(END, ""), "", A),
        ("deepseek_v31", deepseek(v31_call(OBJECT)).removesuffix(SECTION_END), "", A),
        ("kimi_k2", kimi(kimi_call(OBJECT)).replace("<|tool_call_end|>", ""), "", A),
        (
            "kimi_k2",
            kimi(kimi_call(OBJECT), kimi_call(OTHER)).replace("<|tool_call_end|>", ""),
            "",
            TWO,
        ),
        ("kimi_k2", kimi(kimi_call(OBJECT)).removesuffix("<|tool_calls_section_end|>"), "", A),
        ("mistral", f"[TOOL_CALLS][{NAMED}", "", A),
        ("mistral", f'[TOOL_CALLS]write[ARGS]{OBJECT}[TOOL_CALLS]write[ARGS]{{"path": "b"}}', "", TWO),
        ("llama3_json", '{"name": "write", "parameters": {"path": "a"}', "", A),
        ("pythonic", "[write(path='a')", "", A),
        ("pythonic", "<|python_start|>[write(path='a')]", "", A),
        ("openai", harmony(OBJECT, end="") + harmony(OTHER), "", TWO),
        ("json", f"[{NAMED}", "", A),
    ],
    "no arguments": [
        ("hermes", '<tool_call>\n{"name": "stop"}\n</tool_call>', "", STOP),
        ("hermes", hermes("", name="stop").replace(": }", ': ""}'), "", STOP),
        ("hermes", hermes("null", name="stop"), "", STOP),
        ("hermes", hermes("{}", name="stop"), "", STOP),
        ("qwen3_coder", qwen("", name="stop"), "", STOP),
        ("qwen3_coder", "<tool_call><function=stop></tool_call>", "", STOP),
        ("glm45", "<tool_call>stop</tool_call>", "", STOP),
        ("deepseek_v32", dsml("", name="stop"), "", STOP),
        ("deepseek_v3", deepseek(v3_call("", name="stop")), "", STOP),
        ("deepseek_v3", deepseek(v3_call("{}", name="stop")), "", STOP),
        (
            "deepseek_v3",
            deepseek(f"{BEGIN}function<｜tool▁sep｜>stop{END}"),
            "",
            STOP,
        ),
        ("deepseek_v31", deepseek(v31_call("", name="stop")), "", STOP),
        ("deepseek_v31", deepseek(f"{BEGIN}stop{END}"), "", STOP),
        ("kimi_k2", kimi(kimi_call("", name="functions.stop:0")), "", STOP),
        ("kimi_k2", kimi("<|tool_call_begin|>functions.stop:0<|tool_call_end|>"), "", STOP),
        ("mistral", "[TOOL_CALLS]stop[ARGS]", "", STOP),
        ("mistral", "[TOOL_CALLS]stop", "", STOP),
        ("mistral", f"[TOOL_CALLS]stop[TOOL_CALLS]write[ARGS]{OBJECT}", "", [("stop", {}), *A]),
        ("mistral", '[TOOL_CALLS][{"name": "stop"}]', "", STOP),
        ("llama3_json", '<|python_tag|>{"name": "stop"}', "", STOP),
        ("llama3_json", '{"name": "stop", "parameters": null}', "", STOP),
        ("pythonic", "[stop()]", "", STOP),
        ("openai", harmony("", name="functions.stop"), "", STOP),
        ("json", '[{"name": "stop", "arguments": {}}]', "", STOP),
    ],
    "no section": [
        ("qwen3_coder", qwen(qwen_value("a")).removeprefix("<tool_call>\n"), "", A),
        ("deepseek_v32", dsml(dsml_value("a")).removeprefix(f"<{D}function_calls>\n"), "", A),
        (
            "deepseek_v32",
            "So:\n" + dsml(dsml_value("a")).split("\n", 1)[1].split(f"</{D}function")[0],
            "So:",
            A,
        ),
        ("deepseek_v3", v3_call(OBJECT), "", A),
        ("deepseek_v3", v3_call(OBJECT) + "\n" + v3_call(OTHER), "", TWO),
        (
            "deepseek_v31",
            "Well. " + v31_call(OBJECT) + v31_call(OTHER) + SECTION_END,
            "Well. ",
            TWO,
        ),
        ("kimi_k2", "Well. " + kimi_call(OBJECT), "Well. ", A),
        ("kimi_k2", kimi_call(OBJECT) + kimi_call(OTHER) + "<|tool_calls_section_end|>", "", TWO),
        ("llama3_json", '{"name": "write", "parameters": {"path": "a"}}', "", A),
        ("pythonic", "[write(path='a')]", "", A),
    ],
    "prose between": [
        ("hermes", hermes(OBJECT) + "\nand\n" + hermes(OTHER), "\nand", TWO),
        (
            "hermes",
            f"<tool_call>{NAMED} and so on</tool_call>",
            " and so on",
            A,
        ),
        ("qwen3_coder", qwen(qwen_value("a")) + "\nand\n" + qwen(qwen_value("b")), "\nand", TWO),
        (
            "qwen3_coder",
            qwen("Now the path:\n" + qwen_value("a")),
            "",
            [("write", invalid('{"path": "a"}\nNow the path:\n', path="a"))],
        ),
        (
            "glm45",
            glm("Now the path:\n" + glm_value("a")).replace("write\nN", "write\n<arg_key>N", 1),
            "",
            [("write", invalid('{"path": "a"}Now the path:\n', path="a"))],
        ),
        ("deepseek_v32", dsml(dsml_value("a")).replace("calls>\n", "calls>\nso:\n", 1), "so:", A),
        (
            "deepseek_v32",
            dsml("so:\n" + dsml_value("a")),
            "",
            [("write", invalid('{"path": "a"}\nso:\n', path="a"))],
        ),
        (
            "deepseek_v32",
            dsml(dsml_value("a"), dsml_value("b")).replace("invoke>\n", "invoke>\nand\n", 1),
            "and",
            TWO,
        ),
        ("deepseek_v31", "Well. " + deepseek(" so ", v31_call(OBJECT)), "Well.  so ", A),
        ("deepseek_v31", deepseek(v31_call(OBJECT), v31_call(OTHER), between=" and "), " and ", TWO),
        ("deepseek_v3", deepseek(v3_call(OBJECT), v3_call(OTHER), between="\nand\n"), "\nand\n", TWO),
        (
            "kimi_k2",
            "Well. " + kimi(" so ", kimi_call(OBJECT), " that was all "),
            "Well.  so  that was all ",
            A,
        ),
        ("kimi_k2", kimi(kimi_call(OBJECT), kimi_call(OTHER), between=" and "), " and ", TWO),
        ("mistral", f"Well. [TOOL_CALLS]write[ARGS]{OBJECT}", "Well. ", A),
        ("llama3_json", 'Let me: {"name": "write", "parameters": {"path": "a"}}', "Let me: ", A),
        ("llama3_json", 'I {do}: {"name": "write", "parameters": {"path": "a"}} yes.', "I {do}:  yes.", A),
        ("pythonic", "Let me: [write(path='a')]", "Let me: ", A),
        ("openai", "<|channel|>final<|message|>Well.<|end|>" + harmony(OBJECT), "Well.", A),
    ],
    "broken second call": [
        ("hermes", hermes(OBJECT, BROKEN), "", [*A, ("write", invalid("not json}\n"))]),
        ("hermes", hermes(OBJECT, "[1]"), "", [*A, ("write", invalid("[1]"))]),
        ("qwen3_coder", qwen(qwen_value("a"), BROKEN + "\n"), "", [*A, ("write", invalid("not json"))]),
        (
            "glm45",
            glm(glm_value("a"), "<arg_key>not a key"),
            "",
            [*A, ("write", invalid("not a key"))],
        ),
        ("deepseek_v32", dsml(dsml_value("a"), BROKEN), "", [*A, ("write", invalid(BROKEN))]),
        ("deepseek_v31", deepseek(v31_call(OBJECT), v31_call(BROKEN)), "", [*A, ("write", invalid(BROKEN))]),
        (
            "deepseek_v3",
            deepseek(v3_call(OBJECT), v3_call(BROKEN)),
            "",
            [*A, ("write", invalid(BROKEN + "\n```"))],
        ),
        ("kimi_k2", kimi(kimi_call(OBJECT), kimi_call(BROKEN)), "", [*A, ("write", invalid(BROKEN))]),
        (
            "mistral",
            f"[TOOL_CALLS]write[ARGS]{OBJECT}[TOOL_CALLS]write[ARGS]{BROKEN}[TOOL_CALLS]stop",
            "",
            [*A, ("write", invalid(BROKEN)), ("stop", {})],
        ),
        ("openai", harmony(OBJECT) + harmony(BROKEN), "", [*A, ("write", invalid(BROKEN))]),
        ("pythonic", "[write(path='a'), write(path=)]", "", [*A, ("write", invalid('{"path": nothing}'))]),
        ("hermes", hermes('{"path": "a", oops}'), "", [("write", invalid('{"path": "a", oops}', path="a"))]),
    ],
    "cut inside a string": [
        (
            "hermes",
            '<tool_call>\n{"name": "write", "arguments": {"path": "rm -rf /tmp',
            "",
            CUT,
        ),
        ("hermes", '<tool_call>\n{"name": "write", "arguments": "{\\"path\\": \\"rm', "", CUT),
        (
            "qwen3_coder",
            "<tool_call>\n<function=write>\n<parameter=path>\nrm -rf /tmp",
            "",
            CUT,
        ),
        ("qwen3_coder", "<tool_call>\n<function=write>\n", "", CUT),
        ("qwen3_coder", '<tool_call>\n<function=write>\n{"path": "rm -rf /tmp', "", CUT),
        ("glm45", "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>rm -rf /tmp", "", CUT),
        ("deepseek_v32", dsml(dsml_value("rm -rf /tmp")).split("tmp")[0], "", CUT),
        (
            "deepseek_v31",
            deepseek(v31_call('{"path": "rm -rf /tmp')).split("<｜tool▁call▁end")[0],
            "",
            CUT,
        ),
        ("deepseek_v3", deepseek(v3_call('{"path": "rm')).split("\n```<")[0], "", CUT),
        ("kimi_k2", kimi(kimi_call('{"path": "rm')).split("<|tool_call_end")[0], "", CUT),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>",
            "",
            CUT,
        ),
        ("mistral", '[TOOL_CALLS]write[ARGS]{"path": "rm', "", CUT),
        ("mistral", '[TOOL_CALLS][{"name": "write", "arguments": {"path": "rm', "", CUT),
        ("llama3_json", '{"name": "write", "parameters": {"path": "rm', "", CUT),
        ("pythonic", "[write(path='rm", "", CUT),
        ("openai", harmony('{"path": "rm', end=""), "", CUT),
        ("json", '[{"name": "write", "arguments": {"path": "rm', "", CUT),
    ],
    "JSON body": [
        ("qwen3_coder", qwen(OBJECT + "\n"), "", A),
        ("qwen3_coder", qwen("```json\n" + OBJECT + "\n```\n"), "", A),
        ("qwen3_coder", qwen(OBJECT + "}\n"), "", A),
        ("qwen3_coder", hermes(OBJECT), "", A),
        ("qwen3_coder", qwen(qwen_value(OBJECT, "arguments")), "", A),
        ("glm45", glm(OBJECT + "\n"), "", A),
        ("glm45", hermes(OBJECT), "", A),
        ("glm45", glm(glm_value(OBJECT, "arguments")), "", A),
        ("deepseek_v32", dsml(OBJECT + "\n"), "", A),
        ("deepseek_v32", dsml(dsml_value(OBJECT, "arguments", string="false")), "", A),
        ("deepseek_v32", dsml(dsml_value(OBJECT, "parameters")), "", A),
        ("hermes", hermes(json.dumps(OBJECT)), "", A),
        ("mistral", f"[TOOL_CALLS]write{OBJECT}", "", A),
        ("kimi_k2", kimi(kimi_call(json.dumps(OBJECT))), "", A),
        (
            "kimi_k2",
            kimi(f"<|tool_call_begin|>{NAMED}<|tool_call_end|>"),
            "",
            A,
        ),
    ],
    "two objects": [
        (
            "hermes",
            f"<tool_call>{NAMED}\n{NAMED_B}</tool_call>",
            "",
            TWO,
        ),
        (
            "llama3_json",
            f"{LLAMA}\n{LLAMA_B}",
            "",
            TWO,
        ),
        (
            "mistral",
            f"[TOOL_CALLS]{NAMED}, {NAMED_B}",
            "",
            TWO,
        ),
        (
            "qwen3_coder",
            f"<tool_call>{NAMED}\n{NAMED_B}</tool_call>",
            "",
            TWO,
        ),
        (
            "qwen3_coder",
            "<tool_call>\n"
            + qwen(qwen_value("a"), qwen_value("b"))
            .replace("<tool_call>\n", "")
            .replace("\n</tool_call>", "")
            + "\n</tool_call>",
            "",
            TWO,
        ),
        ("pythonic", "[write(path='a')]\n[write(path='b')]", "", TWO),
    ],
    "list": [
        (
            "hermes",
            f"<tool_call>[{NAMED}, {NAMED_B}]</tool_call>",
            "",
            TWO,
        ),
        (
            "llama3_json",
            f"[{LLAMA}, {LLAMA_B}]",
            "",
            TWO,
        ),
        ("glm45", f"<tool_call>[{NAMED}]</tool_call>", "", A),
        (
            "mistral",
            f"[TOOL_CALLS] [{NAMED}, {NAMED_B}]",
            "",
            TWO,
        ),
    ],
    "fence": [
        (
            "hermes",
            f"<tool_call>\n```json\n{NAMED}\n```\n</tool_call>",
            "",
            A,
        ),
        ("hermes", hermes("```json\n" + OBJECT + "\n```").replace("```}", "```\n}"), "", A),
        ("llama3_json", f"```json\n{LLAMA}\n```", "", A),
        ("llama3_json", f"So:\n```\n{LLAMA}\n```", "So:", A),
        ("pythonic", "```python\n[write(path='a')]\n```", "", A),
        ("pythonic", "<|python_start|>```python\n[write(path='a')]\n```<|python_end|>", "", A),
        ("mistral", f"[TOOL_CALLS]```json\n[{NAMED}]\n```", "", A),
        ("mistral", f"[TOOL_CALLS]write[ARGS]```json\n{OBJECT}\n```", "", A),
        ("kimi_k2", kimi(kimi_call(f"```json\n{OBJECT}\n```")), "", A),
        ("deepseek_v31", deepseek(v31_call(f"```json\n{OBJECT}\n```")), "", A),
        ("deepseek_v3", deepseek(v3_call(OBJECT).replace("```json\n", "").replace("\n```", "")), "", A),
        ("glm45", glm(f"```json\n{OBJECT}\n```\n"), "", A),
        ("deepseek_v32", dsml(f"```json\n{OBJECT}\n```\n"), "", A),
        ("openai", harmony(f"```json\n{OBJECT}\n```"), "", A),
        ("json", f"```json\n[{NAMED}]\n```", "", A),
    ],
    "extra brace": [
        ("hermes", hermes(OBJECT + "}"), "", A),
        ("hermes", hermes(OBJECT).replace("\n</tool_call>", "}}"), "", A),
        ("hermes", hermes(OBJECT + "}", OTHER).replace("\n</tool_call>", "", 1), "", TWO),
        ("qwen3_coder", qwen(OBJECT + "}}\n"), "", A),
        ("glm45", glm(OBJECT + "}\n"), "", A),
        ("deepseek_v31", deepseek(v31_call(OBJECT + "}")), "", A),
        ("deepseek_v31", v31_call(OBJECT + "}"), "", A),
        ("deepseek_v3", deepseek(v3_call(OBJECT + "}")), "", A),
        ("deepseek_v32", dsml(OBJECT + "}\n"), "", A),
        ("kimi_k2", kimi(kimi_call(OBJECT + "}")), "", A),
        ("mistral", f"[TOOL_CALLS]write[ARGS]{OBJECT}}}", "", A),
        ("mistral", f"[TOOL_CALLS]write[ARGS]{OBJECT}}}[TOOL_CALLS]write[ARGS]" + OTHER, "", TWO),
        ("mistral", f"[TOOL_CALLS][{NAMED}}}]", "", A),
        ("llama3_json", f"{LLAMA}}}", "", A),
        ("pythonic", "[write(path='a'))]", "", A),
        ("openai", harmony(OBJECT + "}"), "", A),
    ],
    "white space": [
        ("hermes", "\n\n" + hermes(OBJECT) + "\n\n", "", A),
        ("hermes", " \n" + hermes(OBJECT) + "\n \n" + hermes(OTHER), "", TWO),
        ("qwen3_coder", "\n\n\n" + qwen(qwen_value("a")) + "\n\n", "", A),
        ("glm45", "\n\n" + glm(glm_value("a")) + "\n\n", "", A),
        ("deepseek_v32", "\n\n\n" + dsml(dsml_value("a")) + "\n", "", A),
        ("deepseek_v31", " \n" + deepseek(v31_call(OBJECT)) + "\n", "", A),
        ("deepseek_v31", deepseek(v31_call(" " + OBJECT + "\n")), "", A),
        ("kimi_k2", "\n" + kimi("\n", kimi_call(" " + OBJECT + " "), "\n") + "\n", "", A),
        ("mistral", "\n" + f"[TOOL_CALLS] write [ARGS] {OBJECT}\n", "", A),
        ("llama3_json", '\n\n\n{ "name" : "write" ,\n "parameters" : {"path": "a"} }\n', "", A),
        ("pythonic", "\n\n\n[ write( path = 'a' ) ]\n", "", A),
        ("json", '\n [ {"name": "write", "arguments": {"path": "a"}} ] \n', "", A),
    ],
    "unknown tool": [
        ("hermes", hermes(OBJECT, name="nope"), "", [("nope", {"path": "a"})]),
        ("kimi_k2", kimi(kimi_call(OBJECT, name="functions.write.0")), "", A),
        ("kimi_k2", kimi(kimi_call(OBJECT, name="write")), "", A),
        ("kimi_k2", kimi(kimi_call(OBJECT, name="functions.write_12")), "", A),
        ("llama3_json", BOB, BOB, []),
        ("llama3_json", NESTED, NESTED, []),
        ("json", '{"name": "Bob", "arguments": {"age": 3}}', '{"name": "Bob", "arguments": {"age": 3}}', []),
        ("pythonic", "[greet(name='Bob')]", "[greet(name='Bob')]", []),
        ("qwen3_coder", "<function=nope>\n</function>", "<function=nope>\n</function>", []),
        ("openai", harmony('{"cmd": "ls"}', name="container.exec"), "", []),
        ("openai", harmony("ls", name="python"), "", []),
    ],
    "nearly JSON": [
        (fmt, text.replace(OBJECT, arguments), "", [("write", value)])
        for fmt, text in [
            ("hermes", hermes(OBJECT)),
            ("deepseek_v31", deepseek(v31_call(OBJECT))),
            ("deepseek_v3", deepseek(v3_call(OBJECT))),
            ("kimi_k2", kimi(kimi_call(OBJECT))),
            ("mistral", f"[TOOL_CALLS]write[ARGS]{OBJECT}"),
            ("llama3_json", LLAMA),
            ("openai", harmony(OBJECT)),
            ("json", f"[{NAMED}]"),
            ("qwen3_coder", qwen(OBJECT + "\n")),
        ]
        for arguments, value in NEARLY_JSON
    ],
}
CASES = [(kind, *case) for kind, cases in SLIPS.items() for case in cases]


def read(fmt: str, pieces: list[str], reasoning: str = "none", tail: str = "") -> ParsedReply:
    parser, reply = ReplyFormat.choose(fmt, reasoning, None).parser(TOOLS, tail), ParsedReply()
    for piece in pieces:
        reply.add(parser.feed(piece))
    reply.add(parser.finish())
    return reply


def summary(reply: ParsedReply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.calls]


def value_of(arguments: str) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(arguments)
    except ValueError:
        return None
    return value


@pytest.mark.parametrize(
    ("kind", "fmt", "text", "content", "calls"),
    CASES,
    ids=[f"{kind}-{fmt}-{index}".replace(" ", "_") for index, (kind, fmt, *_) in enumerate(CASES)],
)
def test_a_slip_costs_no_call(kind: str, fmt: str, text: str, content: str, calls: Calls) -> None:
    """The sense is plain: the call is made, no tag is shown, and no argument is invented."""
    reply = read(fmt, [text])
    assert (reply.content, [(call.name, value_of(call.arguments)) for call in reply.calls]) == (
        content,
        calls,
    )
    for size in (1, 2, 3, 5, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert summary(read(fmt, pieces)) == summary(reply), size


CALL_OF = {
    "hermes": hermes(OBJECT),
    "qwen3_coder": qwen(qwen_value("a")),
    "glm45": glm(glm_value("a")),
    "deepseek_v32": dsml(dsml_value("a")),
    "deepseek_v3": deepseek(v3_call(OBJECT)),
    "deepseek_v31": v31_call(OBJECT),
    "kimi_k2": kimi_call(OBJECT),
    "mistral": f"[TOOL_CALLS][{NAMED}]",
    "mistral_args": f"[TOOL_CALLS]write[ARGS]{OBJECT}",
    "llama3_json": f"{LLAMA}",
    "pythonic": "[write(path='a')]",
}


@pytest.mark.parametrize("fmt", CALL_OF)
@pytest.mark.parametrize(
    ("before", "after", "content", "tail"),
    [
        ("<think>I look.\n", "", "", ""),
        ("<think>I look.\n", "\n</think>", "", ""),
        ("<think>I look. ", "</think>", "", ""),
        ("<think>I look.\n", "\n</think>\n\nok", "ok", ""),
        ("I look.\n", "", "", "<think>\n"),
        ("I look.\n", "\n</think>\n\nok", "ok", "<think>\n"),
    ],
)
def test_a_call_ends_thoughts_that_were_not_closed(
    fmt: str, before: str, after: str, content: str, tail: str
) -> None:
    """Text before the call is reasoning, the call is made, and a late end tag is not shown."""
    text = before + CALL_OF[fmt] + after
    reply = read(fmt, [text], "think", tail)
    assert (reply.reasoning.strip(), reply.content.strip()) == ("I look.", content)
    assert [(call.name, value_of(call.arguments)) for call in reply.calls] == A
    for size in (1, 2, 3, 5, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert summary(read(fmt, pieces, "think", tail)) == summary(reply), size


@pytest.mark.parametrize("fmt", CALL_OF)
@pytest.mark.parametrize("tail", ["", "<think>\n\n</think>\n\n"])
def test_a_stray_end_of_thoughts_behind_a_call_is_no_content(fmt: str, tail: str) -> None:
    """A stray end tag is dropped anywhere; an answer that quotes the tag keeps it."""
    for text in (CALL_OF[fmt] + "</think>", CALL_OF[fmt] + "\n</think>\n\n"):
        reply = read(fmt, list(text), "think", tail)
        assert (reply.content, len(reply.calls)) == ("", 1)
        assert summary(read(fmt, [text], "think", tail)) == summary(reply)
    for text in ("<think>Hm.</think>Yes.</think> No.", "<think>Hm.</think></think>Yes. No."):
        reply = read(fmt, list(text), "think")
        assert (reply.reasoning, reply.content) == ("Hm.", "Yes. No.")
        assert summary(read(fmt, [text], "think")) == summary(reply)
    spoken = read(fmt, ["<think>Hm.</think>It ends with `</think>`."], "think")
    assert (spoken.reasoning, spoken.content) == ("Hm.", "It ends with `</think>`.")


@pytest.mark.parametrize("fmt", CALL_OF)
@pytest.mark.parametrize(
    ("behind", "answer"),
    [(" but no.</think>", "No."), ("</think>", "No."), ("\n</think>\n\n", "No."), ("</think>", None)],
)
def test_who_thinks_about_a_call_has_not_made_it(fmt: str, behind: str, answer: str | None) -> None:
    """A call in the reasoning is a draft if reasoning, an answer or the real call follows."""
    thoughts = f"I could {CALL_OF[fmt]}{behind.partition('<')[0]}"
    real = CALL_OF[fmt].replace("path", "text")
    text = f"<think>I could {CALL_OF[fmt]}{behind}{real if answer is None else answer}"
    for pieces in ([text], list(text)):
        reply = read(fmt, pieces, "think")
        assert (reply.reasoning, reply.content) == (thoughts.rstrip("\n"), answer or "")
        calls = [(call.name, value_of(call.arguments)) for call in reply.calls]
        assert calls == ([] if answer else [("write", {"text": "a"})])
