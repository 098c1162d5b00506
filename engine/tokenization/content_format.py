"""Detects from a chat template's source whether it expects contents as strings or as lists of parts.

As in vLLM, a template that loops over a message's content takes parts. Nothing is rendered.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from jinja2 import nodes


class ContentFormat(StrEnum):
    """The format of contents that is passed to a template."""

    AUTO = "auto"
    """The detected format: strings, parts, or each as the client sent it if the template reads both."""
    STRING = "string"
    OPENAI = "openai"
    """Lists of parts, in OpenAI's format."""


CONTENT_FORMATS = tuple(str(each) for each in ContentFormat)


def takes_parts(template: nodes.Template) -> bool:
    """Whether the template loops over the content of a message."""
    names = _Names(template)
    return any(names.is_content(loop.iter) for loop in template.find_all(nodes.For))


def takes_texts(template: nodes.Template) -> bool:
    """Whether the template tests if a value is a string."""
    return any(test.name == "string" for test in template.find_all(nodes.Test))


class _Names:
    """Names in a template that refer to all messages, to one, or to the content of one. Scopes are
    not distinguished."""

    def __init__(self, template: nodes.Template) -> None:
        self._lists = {"messages"}
        self._messages: set[str] = set()
        self._contents: set[str] = set()
        bindings = list(_bindings(template))
        before = -1
        while (known := len(self._lists) + len(self._messages) + len(self._contents)) != before:
            before = known
            for name, value, is_loop in bindings:
                self._learn(name, value, is_loop)

    def _learn(self, name: str, value: nodes.Node, is_loop: bool) -> None:
        if self._is_list(value):
            (self._messages if is_loop else self._lists).add(name)
        elif not is_loop and self._is_message(value):
            self._messages.add(name)
        elif not is_loop and self.is_content(value):
            self._contents.add(name)

    def is_content(self, node: nodes.Node | None) -> bool:
        """Whether the expression is a message's content, possibly through filters."""
        for inner in _inside(node):
            if isinstance(inner, nodes.Name) and inner.name in self._contents:
                return True
            if _field(inner) == "content" and self._is_message(_owner(inner)):
                return True
        return False

    def _is_message(self, node: nodes.Node | None) -> bool:
        for inner in _inside(node):
            if isinstance(inner, nodes.Name) and inner.name in self._messages:
                return True
            if isinstance(inner, nodes.Getitem) and not isinstance(inner.arg, nodes.Slice):
                return self._is_list(inner.node)
        return False

    def _is_list(self, node: nodes.Node | None) -> bool:
        for inner in _inside(node):
            if isinstance(inner, nodes.Name) and inner.name in self._lists:
                return True
            if isinstance(inner, nodes.Getitem) and isinstance(inner.arg, nodes.Slice):
                return self._is_list(inner.node)
        return False


def _inside(node: nodes.Node | None) -> Iterator[nodes.Node]:
    """Yields the node without filters; for a conditional, both branches."""
    if isinstance(node, nodes.Filter):
        yield from _inside(node.node)
    elif isinstance(node, nodes.CondExpr):
        yield from _inside(node.expr1)
        yield from _inside(node.expr2)
    elif isinstance(node, nodes.Or | nodes.And | nodes.Add):
        yield from _inside(node.left)
        yield from _inside(node.right)
    elif node is not None:
        yield node


def _field(node: nodes.Node) -> str | None:
    """The field that is accessed: ``a.field``, ``a['field']`` or ``a.get('field')``."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return str(node.arg.value)
    if isinstance(node, nodes.Call) and _field(node.node) == "get" and node.args:
        first = node.args[0]
        return str(first.value) if isinstance(first, nodes.Const) else None
    return None


def _owner(node: nodes.Node) -> nodes.Node | None:
    """The object whose field is accessed."""
    if isinstance(node, nodes.Call):
        return _owner(node.node)
    return node.node if isinstance(node, nodes.Getattr | nodes.Getitem) else None


def _bindings(template: nodes.Template) -> Iterator[tuple[str, nodes.Node, bool]]:
    """Yields names, their values, and whether they iterate over the value."""
    for loop in template.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            yield loop.target.name, loop.iter, True
    for assigned in template.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name):
            yield assigned.target.name, assigned.node, False
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            for parameter, argument in zip(macro.args, call.args, strict=False):
                yield parameter.name, argument, False
            for keyword in call.kwargs:
                yield keyword.key, keyword.value, False
