"""CSS of the pages. Colours after Okabe and Ito, distinguishable by the colour-blind: darker on white, lighter on black."""

COLORS = 8  # in the palette of the runs, --p0 to --p7; it repeats from the ninth run
DASHES = 3  # patterns of lines, of which each repetition of the palette has its own

CSS = """
:root{--bg:#fff;--panel:#f6f7f9;--ink:#1b1f24;--soft:#57606a;--rule:#d5dae0;
--p0:#0b66a8;--p1:#b84e00;--p2:#007a5a;--p3:#a3437e;--p4:#7a6200;--p5:#3a7fae;--p6:#5b4bb5;--p7:#444c56;
--good:#116b3c;--good-bg:#ddf3e4;--warn:#7a5200;--warn-bg:#fdf0cf;--bad:#a1151f;--bad-bg:#fde3e1}
@media screen and (prefers-color-scheme:dark){:root{--bg:#0f1216;--panel:#181c22;--ink:#e8ebef;--soft:#a0a9b4;--rule:#333a44;
--p0:#5cb3f0;--p1:#f5914a;--p2:#3fcf9f;--p3:#e58fc0;--p4:#e3cf4a;--p5:#9bd0f2;--p6:#a99cf5;--p7:#b8c0ca;
--good:#7fe0a8;--good-bg:#12351f;--warn:#f0cc6a;--warn-bg:#3a2e0c;--bad:#ff9c95;--bad-bg:#431917}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1160px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:2rem;line-height:1.2;margin:0 0 .6rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.6rem 0 .8rem;padding-top:1.1rem;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:1.2rem 0 .3rem;overflow-wrap:anywhere}
.kind{margin:0;color:var(--soft);font-size:.85rem;letter-spacing:.06em;text-transform:uppercase}
.lead{max-width:46em;margin:.2rem 0 .6rem}
.note,small,.unit{color:var(--soft);font-size:.85rem;font-weight:400}
p.note{margin:.3rem 0}
.chip{font-size:.8rem;font-weight:600;letter-spacing:0;padding:.15em .7em;border-radius:1em;vertical-align:middle;white-space:nowrap;
background:var(--panel);color:var(--soft)}
.chip.good{background:var(--good-bg);color:var(--good)}.chip.warn{background:var(--warn-bg);color:var(--warn)}
.chip.bad{background:var(--bad-bg);color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:10px;margin:1.4rem 0 0}
.cards div{background:var(--panel);border-radius:8px;padding:11px 12px}
dt{color:var(--soft);font-size:.85rem}dd{margin:0;font-size:1.08rem;letter-spacing:-.01em;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.3}
.cards small{display:block;line-height:1.3;font-size:.78rem}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:26px 30px}
figure{margin:0}figcaption{font-weight:600;font-size:.95rem;margin-bottom:4px}
svg text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.c0{--c:var(--p0)}.c1{--c:var(--p1)}.c2{--c:var(--p2)}.c3{--c:var(--p3)}.c4{--c:var(--p4)}.c5{--c:var(--p5)}.c6{--c:var(--p6)}.c7{--c:var(--p7)}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:3px;background:var(--c);margin-right:.45em;vertical-align:-.05em}
.legend{display:flex;flex-wrap:wrap;gap:.3em 1.3em;margin:.2rem 0 1rem;font-size:.9rem;align-items:center}
.bar{display:flex;height:26px;border-radius:6px;overflow:hidden;gap:1px;margin:.4rem 0 .7rem}
.part{background:var(--part)}.step{--part:var(--p2)}.lost{--part:var(--bad)}.init{--part:var(--p4)}.compile{--part:var(--p6)}
.wait_hosts{--part:var(--warn)}.restore{--part:var(--p5)}.data_wait{--part:var(--p1)}.save{--part:var(--p3)}.eval{--part:var(--p0)}
.hang{--part:var(--ink)}.elastic{--part:var(--good)}.down{--part:var(--rule)}
.keys{list-style:none;display:flex;flex-wrap:wrap;gap:.2em 1.6em;padding:0;margin:0 0 .6rem;font-size:.9rem}
.keys b{font-variant-numeric:tabular-nums}
.scroll{overflow:auto;max-height:48rem;background:linear-gradient(var(--bg),var(--bg)) 0 100%/100% 12px no-repeat local,
linear-gradient(var(--bg),var(--bg)) 100% 0/12px 100% no-repeat local,
linear-gradient(transparent,var(--rule)) 0 100%/100% 12px no-repeat scroll,
linear-gradient(90deg,transparent,var(--rule)) 100% 0/12px 100% no-repeat scroll}
table{border-collapse:collapse;font-size:.9rem;min-width:min(100%,30rem)}
th,td{text-align:left;padding:.35rem 1.4rem .35rem 0;border-bottom:1px solid var(--rule);vertical-align:top;
font-variant-numeric:tabular-nums}
tbody th{font-weight:400;white-space:nowrap}thead th{position:sticky;top:0;background:var(--bg);color:var(--soft);font-weight:600}
.numbers td,.numbers thead th+th{text-align:right;padding:.35rem 0 .35rem 1.4rem;white-space:nowrap}
.dot{display:inline-block;width:.6em;height:.6em;border-radius:50%;margin-right:.6em;background:var(--soft)}
.dot.start,.dot.stop{background:var(--p0)}.dot.save{background:var(--p2)}.dot.eval{background:var(--p6)}
.dot.skip,.dot.preempt,.dot.interrupt{background:var(--p1)}.dot.rollback,.dot.killed,.dot.observer{background:var(--bad)}.dot.restore{background:var(--p3)}
code,pre{font:.85rem/1.5 ui-monospace,"SF Mono",Menlo,Consolas,monospace}
summary{cursor:pointer;padding:.3rem 0}pre{background:var(--panel);border-radius:8px;padding:14px 16px;overflow-x:auto;margin:.3rem 0 1rem}
@media(max-width:760px){main{padding:20px 16px 40px}h1{font-size:1.5rem;margin-bottom:.4rem}h2{margin-top:1.8rem}svg text{font-size:17px}
.lead{font-size:.92rem;line-height:1.45}
.cards{grid-template-columns:repeat(auto-fill,minmax(98px,1fr));gap:6px;margin-top:.8rem}
.cards div{padding:6px 8px;overflow-wrap:anywhere;hyphens:auto}
.cards dt{font-size:.76rem;line-height:1.25}.cards dd{font-size:.95rem}.cards small{display:none}
tbody th{white-space:normal;overflow-wrap:break-word;min-width:6.5rem}th,td{padding:.22rem .8rem .22rem 0}
.numbers td,.numbers thead th+th{padding:.22rem 0 .22rem .8rem}}
@media print{*{print-color-adjust:exact;-webkit-print-color-adjust:exact}body{font-size:11pt}main{padding:0}
.scroll{max-height:none;overflow:visible;background:none}thead th{position:static}table{font-size:.8rem}
th,td,tbody th{white-space:normal!important}
.grid2{grid-template-columns:1fr 1fr;gap:14px 18px}.grid3{grid-template-columns:1fr 1fr 1fr}
.cards{grid-template-columns:repeat(auto-fill,minmax(120px,1fr))}
figure,tr,.cards div,.bar,.keys{break-inside:avoid}h2,h3,figcaption,.legend{break-after:avoid}
pre{white-space:pre-wrap;max-height:none}details:not([open]),.folded{display:none}}
"""

# Only on pages with heat maps. Both ends of the scale contrast with the background, in light and dark.
HEAT_CSS = """
:root{--h0:#0b2a4a;--h1:#2166ac;--h2:#67a9cf;--h3:#c3dfee;--h4:#f1f2f4;--h5:#fde0c8;--h6:#f4a264;--h7:#d6602d;--h8:#8c1d04}
@media screen and (prefers-color-scheme:dark){
:root{--h0:#d5ecff;--h1:#6db3e8;--h2:#3a76a8;--h3:#2b435a;--h4:#20262e;--h5:#54402f;--h6:#a05f2c;--h7:#ea8a3c;--h8:#ffd9b0}}
.h0{--c:var(--h0)}.h1{--c:var(--h1)}.h2{--c:var(--h2)}.h3{--c:var(--h3)}.h4{--c:var(--h4)}
.h5{--c:var(--h5)}.h6{--c:var(--h6)}.h7{--c:var(--h7)}.h8{--c:var(--h8)}
svg.heat{display:block;width:100%;height:200px}
.heat path{stroke:var(--c);fill:none;shape-rendering:crispEdges}.ground{fill:var(--c)}
.scale .swatch{outline:1px solid var(--rule)}
.grid3{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:22px 24px}.maps{margin:.4rem 0 1.8rem}
.dot.alarm{background:var(--bad)}
"""
