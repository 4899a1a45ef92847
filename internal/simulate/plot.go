package simulate

import (
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	_ "gonum.org/v1/plot/vg/vgimg" // png
	_ "gonum.org/v1/plot/vg/vgsvg" // svg
)

// styles tell up to eight policies apart, in colours that the colour-blind can tell apart as well
// (Okabe and Ito's), and by their marks.
var styles = []struct {
	color color.RGBA
	mark  draw.GlyphDrawer
}{
	{color.RGBA{0, 0, 0, 255}, draw.CircleGlyph{}},
	{color.RGBA{0, 114, 178, 255}, draw.SquareGlyph{}},
	{color.RGBA{86, 180, 233, 255}, draw.TriangleGlyph{}},
	{color.RGBA{0, 158, 115, 255}, draw.PyramidGlyph{}},
	{color.RGBA{204, 121, 167, 255}, draw.BoxGlyph{}},
	{color.RGBA{213, 94, 0, 255}, draw.CircleGlyph{}},
	{color.RGBA{230, 159, 0, 255}, draw.RingGlyph{}},
	{color.RGBA{120, 120, 120, 255}, draw.CrossGlyph{}},
}

// Plot draws the hit ratio over the capacity, a panel for each trace and a line for each policy, as
// an image of format png or svg. A dashed line is the ratio of a cache that never evicts.
func Plot(w io.Writer, format string, p Plan, results []Result) error {
	const side = 4.6 * vg.Inch
	canvas, err := draw.NewFormattedCanvas(side*vg.Length(len(p.Traces)), 0.85*side, format)
	if err != nil {
		return err
	}
	dc := draw.New(canvas)
	tiles := draw.Tiles{Rows: 1, Cols: len(p.Traces), PadX: 0.15 * vg.Inch, PadTop: 0.1 * vg.Inch,
		PadBottom: 0.1 * vg.Inch, PadLeft: 0.1 * vg.Inch, PadRight: 0.15 * vg.Inch}
	for i, t := range p.Traces {
		panel, err := panel(p, t, results[i*len(p.Policies)*len(p.Capacities):], i == 0)
		if err != nil {
			return err
		}
		panel.Draw(tiles.At(dc, i, 0))
	}
	_, err = canvas.WriteTo(w)
	return err
}

func panel(p Plan, t *Trace, results []Result, legend bool) (*plot.Plot, error) {
	panel := plot.New()
	panel.Title.Text = t.Name
	panel.Title.Padding = 4
	panel.X.Label.Text = "capacity (blocks)"
	panel.Y.Label.Text = "prefix hits (% of blocks)"
	panel.X.Scale = plot.LogScale{}
	panel.X.Tick.Marker = ticks(p.Capacities)
	panel.Legend.Top, panel.Legend.Left = true, true
	panel.Legend.XOffs, panel.Legend.YOffs = 6, -12
	panel.Legend.Padding = 2
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{225}, color.Gray{225}
	panel.Add(grid)
	order := make([]int, len(p.Capacities)) // of the capacities by size
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return p.Capacities[a] - p.Capacities[b] })
	for k, name := range p.Policies {
		points := make(plotter.XYs, len(order))
		for i, at := range order {
			points[i] = plotter.XY{X: float64(p.Capacities[at]),
				Y: 100 * results[k*len(p.Capacities)+at].Ratio()}
		}
		line, marks, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		style := styles[k%len(styles)]
		line.Color, line.Width = style.color, vg.Points(1.4)
		marks.Color, marks.Shape, marks.Radius = style.color, style.mark, vg.Points(2.6)
		panel.Add(line, marks)
		if legend {
			panel.Legend.Add(name, line, marks)
		}
	}
	first, last := float64(p.Capacities[order[0]]), float64(p.Capacities[order[len(order)-1]])
	ceiling, err := plotter.NewLine(plotter.XYs{{X: first, Y: 100 * t.Ceiling()},
		{X: last, Y: 100 * t.Ceiling()}})
	if err != nil {
		return nil, err
	}
	ceiling.Color, ceiling.Dashes = color.Gray{110}, []vg.Length{4, 3}
	panel.Add(ceiling)
	if legend {
		panel.Legend.Add("never evicts", ceiling)
	}
	panel.Y.Min, panel.Y.Max = 0, math.Max(103*t.Ceiling(), 1)
	panel.X.Min, panel.X.Max = first/1.1, last*1.1
	return panel, nil
}

// ticks marks the capacities, and names those that are far enough from the last one named.
type ticks []int

func (c ticks) Ticks(low, high float64) []plot.Tick {
	var marks []plot.Tick
	named := 0.0
	for _, n := range slices.Sorted(slices.Values(c)) {
		mark := plot.Tick{Value: float64(n)}
		if named == 0 || float64(n) > named*math.Pow(high/low, 0.09) {
			mark.Label, named = FormatBlocks(n), float64(n)
		}
		marks = append(marks, mark)
	}
	return marks
}

// FormatBlocks writes a number of blocks as capacities are written: 500, 10k, 2.5k, 1m.
func FormatBlocks(n int) string {
	for _, unit := range []struct {
		size int
		name string
	}{{1_000_000, "m"}, {1_000, "k"}} {
		if n >= unit.size && n%(unit.size/10) == 0 {
			return strconv.FormatFloat(float64(n)/float64(unit.size), 'f', -1, 64) + unit.name
		}
	}
	return fmt.Sprint(n)
}
