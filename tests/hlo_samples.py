"""Small compiled programs as text, written by hand so that what they hold is known."""

from jaxscale.tools.preflight.hlo import read_hlo

MESH = {"data": 2, "fsdp": 4}


def facts_of(body, before="", mesh=MESH, slice_of=None, partitions=8, torus=None):
    """The facts of a program whose entry is `body`."""
    return read_hlo(
        f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n{before}\n"
        f"ENTRY %main (p: f32[4]) -> f32[4] {{\n  %p = f32[4] parameter(0)\n{body}\n}}\n",
        mesh,
        slice_of,
        torus,
    )


def only_collective(body, **options):
    """The one collective of a program."""
    (found,) = facts_of(body, **options).collectives
    return found


# A loop over (counter, f32[4]), to be filled in; LOOP_CALL runs it.
LOOP = """\
%cond (c: (s32[], f32[4])) -> pred[] {{
  %c = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant({limit})
  ROOT %less = pred[] compare(%i, %limit), direction={direction}
}}
%body (c: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %c = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[4] get-tuple-element(%c), index=1
  %one = s32[] constant({stride})
  {work}
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[4]) tuple(%next, %x)
}}
"""
LOOP_CALL = """\
  %begin = s32[] constant({start})
  %copy = s32[] copy(%begin)
  %init = (s32[], f32[4]) tuple(%copy, %p)
  %loop = (s32[], f32[4]) while(%init), condition=%cond, body=%body"""
