"""Chat templates that try to get out of their sandbox, or never to end, or to fill the memory."""

from __future__ import annotations

ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "attr": "{{ ''|attr('__class__') }}",
    "attr by map": "{{ ['']|map(attribute='__class__')|list }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format_map": "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "self": "{{ self.__init__.__globals__ }}",
    "undefined": "{{ nothing.__init__.__globals__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends '/etc/passwd' %}",
    "change": "{{ messages.append(1) }}",
    "change a dict": "{{ messages[0].update({'role': 'system'}) }}",
    "generator": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "function": "{% macro f() %}{% endmacro %}{{ f.__func__ }}{{ raise_exception.__globals__ }}",
    "code": "{{ raise_exception.__code__.co_consts }}",
}
"""Hostile templates by their aim. A rendering must not reach that aim."""

WORK = {
    "nested loops": "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "loop over text": "{% for a in 'x' * 99999 %}{% for b in 'x' * 99999 %}{% endfor %}{% endfor %}",
    "loop with a test": "{% for a in range(99999) if a < 0 %}{% endfor %}" * 99,
    "recursive loop": "{% for a in [[]] recursive %}{{ loop([[], []]) }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "caller": "{% macro f(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}" * 50,
    "range": "{{ range(10 ** 12)|list }}",
    "times": "{{ ('x' * 10 ** 9)|length }}",
    "list times": "{{ ([0] * 10 ** 9)|length }}",
    "times a list": "{{ (10 ** 9 * [0])|length }}",
    "power": "{{ 9 ** 999999 }}",
    "long numbers": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[0]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by block": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = y %}{% endfor %}"
    ),
    "doubling by join": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = [n.x, n.x]|join %}{% endfor %}"
    ),
    "doubling by method": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x.join(['', '', '']) %}{% endfor %}"
    ),
    "doubling by replace": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x|replace('x', 'xx') %}{% endfor %}"
    ),
    "doubling by replace method": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x.replace('x', 'xx') %}{% endfor %}"
    ),
    "translate": "{{ ('x' * 99999).translate({120: 'y' * 99999})|length }}",
    "translate by a list": "{{ ('\x00' * 99999).translate(['y' * 99999])|length }}",
    "doubling by translate": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x.translate({120: 'xx'}) %}{% endfor %}"
    ),
    "bytes replace": "{{ ('x' * 99999).encode().replace('x'.encode(), ('y' * 99999).encode())|length }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10)|length }}",
    "nesting": "{% set n = namespace(x=[0]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nesting as JSON": (
        "{% set n = namespace(x=[0]) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}"
        "{{ n.x|tojson }}"
    ),
    "nesting as text": (
        "{% set n = namespace(x=[0]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ (n.x|string)|length }}"
    ),
    "nesting by ~": (
        "{% set n = namespace(x=[0]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ (n.x ~ '')|length }}"
    ),
    "center": "{{ 'x'|center(10 ** 9)|length }}",
    "ljust": "{{ 'x'.ljust(10 ** 9)|length }}",
    "zfill": "{{ 'x'.zfill(10 ** 9)|length }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9)|length }}",
    "indent": "{{ ('a\nb' * 99)|indent(10 ** 9)|length }}",
    "indented JSON": "{{ [[1]]|tojson(indent=10 ** 9) }}",
    "batch": "{{ [1]|batch(10 ** 9, 0)|list }}",
    "slice": "{{ [1]|slice(10 ** 9)|list|length }}",
    "round": "{{ 1.5|round(10 ** 9, 'ceil') }}",
    "format a width": "{{ '{:1000000000}'.format(1)|length }}",
    "format a given width": "{{ '{:{}}'.format(1, 10 ** 9)|length }}",
    "% a width": "{{ ('%1000000000d' % 1)|length }}",
    "% a given width": "{{ ('%*d' % (10 ** 9, 1))|length }}",
    "format filter": "{{ ('%1000000000d'|format(1))|length }}",
    "constants": "{{ 'x' * 10 ** 10 }}{{ 'x'|center(10 ** 10) }}",
    "lipsum": "{{ lipsum(n=10 ** 6) }}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
}
"""None of them may take more than a moment, or more than a few megabytes."""
