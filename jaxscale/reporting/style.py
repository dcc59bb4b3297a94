"""The page's style: one column on a phone, two on a desk; light, dark and paper.

Line colours are those of Okabe and Ito (jfly.uni-koeln.de/color, 2002), which people with any of the common kinds of
colour blindness can tell apart, lightened for a dark ground. The heat map's run from dark blue to yellow in even steps
of lightness, so that they also read in grey.
"""

LIGHT = """--bg:#fff;--fg:#1b1f24;--soft:#5c6670;--rule:#e3e6ea;--card:#f7f8fa;--grid:#e9ecef;--gone:#a9b0b8;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b0578d;--c4:#b98400;--c5:#2a9fd6;--c6:#6b5b95;--c7:#4d4d4d;
--trouble:#c8321f;--change:#7d8790;--good:#0b7a53;--warn:#9a6700;color-scheme:light"""
DARK = """--bg:#14171a;--fg:#e4e7ea;--soft:#98a2ac;--rule:#2b3036;--card:#1b1f23;--grid:#262b30;--gone:#626b74;
--c0:#56b4e9;--c1:#f0883e;--c2:#3fc79a;--c3:#dc96c3;--c4:#e8b83a;--c5:#8ad0f7;--c6:#b3a4e0;--c7:#c4c9ce;
--trouble:#ff7b6b;--change:#8b949e;--good:#4fc596;--warn:#dfb04a;color-scheme:dark"""
HEAT = (
    "#00224e", "#0c3066", "#2f4070", "#474e6c", "#5a5d6d", "#6d6c71", "#807c78", "#958d77", "#aa9e72", "#c1b069",
    "#dbc55a", "#fee838",
)  # fmt: skip
# the last of those that stand two in a row, where nothing stands beside it
LONE = ".plots>:nth-child(odd of :not(.wide)):nth-last-child(1 of :not(.wide))"

BODY = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0 auto;max-width:1200px;padding:28px 24px 64px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;font-variant-numeric:tabular-nums}
h1{font-size:24px;line-height:1.25;font-weight:650;margin:0;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{font-size:17px;font-weight:650;margin:44px 0 14px;padding-top:14px;border-top:1px solid var(--rule)}
h3{font-size:14px;font-weight:650;margin:22px 0 8px}
p{margin:0 0 10px;max-width:75ch}
a{color:inherit;text-decoration-color:var(--gone);text-underline-offset:3px}
code,pre,.mono{font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
nav{margin-top:16px;font-size:13px;color:var(--soft);display:flex;flex-wrap:wrap;gap:4px 18px}
nav a{text-decoration:none}nav a:hover{text-decoration:underline}
.top{display:flex;flex-wrap:wrap;align-items:baseline;gap:6px 14px}
.state{font-size:13px;font-weight:600;white-space:nowrap}
.state::before{content:"";display:inline-block;width:8px;height:8px;border-radius:50%;background:currentColor;
margin-right:7px}
.running{color:var(--c0)}.finished{color:var(--good)}.stopped,.silent{color:var(--warn)}.failed{color:var(--trouble)}
.sub{color:var(--soft);font-size:13.5px;margin:4px 0 0;max-width:none;overflow-wrap:anywhere}
.bar{height:4px;border-radius:2px;background:var(--rule);margin:16px 0 0;overflow:hidden}
.bar i{display:block;height:100%;background:var(--c0)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(112px,1fr));gap:18px 20px;margin:20px 0 0}
.facts div{min-width:0}
.facts dt{font-size:12.5px;color:var(--soft)}
.facts dd{margin:0;font-size:20px;font-weight:600;line-height:1.3;letter-spacing:-.01em;overflow-wrap:anywhere}
.facts dd small{display:block;font-size:12.5px;font-weight:400;color:var(--soft);letter-spacing:0}
.plots{display:grid;grid-template-columns:minmax(0,1fr);grid-auto-flow:dense;gap:26px 34px}
.plots>.wide,LONE{grid-column:1/-1;--height:300px}
@media(min-width:880px){.plots{grid-template-columns:repeat(2,minmax(0,1fr))}}
.plot{margin:0;min-width:0;break-inside:avoid}
figcaption{font-size:13.5px;line-height:1.45;margin-bottom:8px;display:flex;flex-wrap:wrap;gap:0 9px;
align-items:baseline}
figcaption b{font-weight:620}
.unit,.note,.legend,.readout{color:var(--soft);font-size:12.5px}
.note{margin:4px 0 0;max-width:none}
.legend{display:inline-flex;flex-wrap:wrap;gap:0 13px;margin-left:auto;max-height:6.4em;overflow-y:auto}
.legend>span{overflow-wrap:anywhere}
.readout{flex-basis:100%;min-height:1.45em;color:var(--fg)}
.key{width:20px;height:10px;vertical-align:-.05em;margin-right:5px}
.area{position:relative;height:var(--height,216px);margin:0 10px 42px 52px;outline:0;touch-action:pan-y;
cursor:crosshair;user-select:none;-webkit-user-select:none}
.area:focus-visible{box-shadow:0 0 0 2px var(--bg),0 0 0 4px var(--c0);border-radius:2px}
.area svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible;clip-path:inset(-4px);display:block}
path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--grid);stroke-width:1}
.line,.faint,.dash,.gone{stroke:currentColor;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
.faint{stroke-width:1;opacity:.38}.dash{stroke-dasharray:5 4}
.k1{stroke-dasharray:9 3}.k2{stroke-dasharray:2 3}.k3{stroke-dasharray:9 3 2 3}
path.gone{color:var(--gone);stroke-width:1.3}
.dots{stroke:currentColor;stroke-width:6;stroke-linecap:round}
.limit{stroke:currentColor;stroke-width:1.2;stroke-dasharray:1 4;stroke-linecap:round}
.band{fill:var(--c4);opacity:.2}
.mark{stroke-width:1.2;stroke:currentColor}.trouble{color:var(--trouble)}.change{color:var(--change)}
path.mark{opacity:.5}path.change{stroke-dasharray:2 3}
.cursor{stroke:var(--soft);stroke-width:1}.select{fill:var(--c0);opacity:.14}
.ty,.tx,.xn{position:absolute;font-size:11.5px;line-height:1;color:var(--soft);white-space:nowrap}
.ty{right:100%;margin-right:8px;transform:translateY(-50%)}
.tx{top:100%;margin-top:8px;transform:translateX(-50%)}.tx.end{transform:translateX(-100%);margin-left:8px}
.xn{top:100%;margin-top:25px;left:50%;transform:translateX(-50%)}
.heat .ty{max-width:72px;overflow:hidden;text-overflow:ellipsis;line-height:1.3}
.scale{display:inline-flex;align-items:center;gap:6px}.scale i{width:11px;height:9px;margin:0 -6px 0 0}
.scale i:last-of-type{margin:0}
.heat path{stroke:none}
.table{overflow-x:auto;margin:0 0 14px}.top+.table{margin-top:14px}.plots+.table{margin-top:24px}
table{border-collapse:collapse;font-size:13.5px}
th,td{text-align:left;padding:5px 18px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;color:var(--soft);font-size:12.5px;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}th.n{white-space:normal;vertical-align:bottom}
td.mono{overflow-wrap:anywhere;min-width:9em}td.w{min-width:22ch;overflow-wrap:anywhere}
td.t{white-space:nowrap;color:var(--soft)}
tr.trouble td:first-child{color:var(--trouble)}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.all{color:var(--soft)}.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);border-radius:6px;padding:12px 14px;
margin:0 0 14px;
max-height:340px;overflow-y:auto}
details{margin:0 0 14px}summary{cursor:pointer;font-size:13.5px;color:var(--soft)}
details[open] summary{margin-bottom:10px}
.left{color:var(--soft);font-size:13.5px}.fine{color:var(--soft);font-size:12.5px;margin:14px 0 0;max-width:none}
ul.told{margin:14px 0 0;padding:10px 14px 10px 30px;background:var(--card);border-radius:6px;font-size:13.5px;
color:var(--soft)}
.pair{display:grid;grid-template-columns:minmax(0,1fr);gap:0 34px}
@media(min-width:880px){.pair{grid-template-columns:repeat(2,minmax(0,1fr))}}
#reset{position:fixed;right:16px;bottom:16px;font:inherit;font-size:13px;padding:8px 14px;border-radius:18px;
cursor:pointer;
border:1px solid var(--rule);background:var(--bg);color:var(--fg);box-shadow:0 2px 10px rgb(0 0 0/.18)}
#reset[hidden]{display:none}
footer{margin-top:44px;padding-top:14px;border-top:1px solid var(--rule);color:var(--soft);font-size:12.5px}
@media(max-width:560px){body{padding:18px 14px 48px}h1{font-size:21px}.facts{gap:14px 16px;
grid-template-columns:1fr 1fr}
.facts dd{font-size:18px}.area{height:200px;margin-left:48px;margin-right:6px}.legend{margin-left:0}
.heat .ty{max-width:54px}}
"""
PAPER = """body{max-width:none;padding:0;font-size:10.5pt}nav,#reset,.readout{display:none}h2{break-after:avoid;
margin-top:22px}
.plots{grid-template-columns:repeat(2,minmax(0,1fr))}.area{height:150px}
pre,.legend{max-height:none}tr,pre{break-inside:avoid}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}"""


def style() -> str:
    """The style sheet."""
    heat = "".join(f".h{i}{{fill:{color};background:{color}}}" for i, color in enumerate(HEAT))
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    return f":root{{{LIGHT}}}{dark}{BODY.replace('LONE', LONE)}{heat}@media print{{{PAPER}}}"
