// Package hitplot draws the output of `lookaside simulate --format json`.
package hitplot

import (
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	_ "gonum.org/v1/plot/vg/vgimg" // png
	_ "gonum.org/v1/plot/vg/vgsvg" // svg

	"lookaside/internal/simulate"
)

// styles distinguish up to eight policies by their marks and by colours that are safe for the
// colour-blind (Okabe and Ito's).
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

// Draw writes an image of format png or svg to w: the hit ratio over the capacity, with a panel for
// each trace and a line for each policy. A dashed line is the ratio of a cache that never evicts.
func Draw(w io.Writer, format string, r simulate.Report) error {
	each, err := check(r)
	if err != nil {
		return err
	}
	const side = 4.6 * vg.Inch
	canvas, err := draw.NewFormattedCanvas(side*vg.Length(len(r.Traces)), 0.85*side, format)
	if err != nil {
		return err
	}
	dc := draw.New(canvas)
	tiles := draw.Tiles{Rows: 1, Cols: len(r.Traces), PadX: 0.15 * vg.Inch, PadTop: 0.1 * vg.Inch,
		PadBottom: 0.1 * vg.Inch, PadLeft: 0.1 * vg.Inch, PadRight: 0.15 * vg.Inch}
	for i, t := range r.Traces {
		panel, err := panel(t, r.Results[i*each:(i+1)*each], i == 0)
		if err != nil {
			return err
		}
		panel.Draw(tiles.At(dc, i, 0))
	}
	_, err = canvas.WriteTo(w)
	return err
}

// check returns the number of results of each trace. It returns an error if a report cannot be
// drawn.
func check(r simulate.Report) (each int, err error) {
	if len(r.Traces) == 0 || len(r.Results) == 0 || len(r.Results)%len(r.Traces) != 0 {
		return 0, fmt.Errorf("%d results of %d traces: this is no report of lookaside simulate",
			len(r.Results), len(r.Traces))
	}
	each = len(r.Results) / len(r.Traces)
	for i, o := range r.Results {
		if name := r.Traces[i/each].Name; o.Trace != name {
			return 0, fmt.Errorf("result %d is of trace %q, not of %q", i, o.Trace, name)
		}
		if o.Capacity < 1 {
			return 0, fmt.Errorf("result %d has a capacity of %d blocks", i, o.Capacity)
		}
	}
	return each, nil
}

// panel draws one trace. Its results are in order of the policies.
func panel(t simulate.TraceReport, results []simulate.Outcome, legend bool) (*plot.Plot, error) {
	var capacities []int
	for _, o := range results {
		capacities = append(capacities, o.Capacity)
	}
	first, last := float64(slices.Min(capacities)), float64(slices.Max(capacities))
	panel := plot.New()
	panel.Title.Text = t.Name
	panel.Title.Padding = 4
	panel.X.Label.Text = "capacity (blocks)"
	panel.Y.Label.Text = "prefix hits (% of blocks)"
	panel.X.Scale = plot.LogScale{}
	panel.X.Tick.Marker = ticks(capacities)
	panel.Legend.Top, panel.Legend.Left = true, true
	panel.Legend.XOffs, panel.Legend.YOffs = 6, -12
	panel.Legend.Padding = 2
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{225}, color.Gray{225}
	panel.Add(grid)
	for k := 0; len(results) > 0; k++ {
		n := slices.IndexFunc(results,
			func(o simulate.Outcome) bool { return o.Policy != results[0].Policy })
		if n < 0 {
			n = len(results)
		}
		outcomes := slices.SortedFunc(slices.Values(results[:n]),
			func(a, b simulate.Outcome) int { return a.Capacity - b.Capacity })
		name := results[0].Policy
		results = results[n:]
		points := make(plotter.XYs, len(outcomes))
		for i, o := range outcomes {
			points[i] = plotter.XY{X: float64(o.Capacity), Y: 100 * o.Ratio}
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
	ceiling, err := plotter.NewLine(plotter.XYs{{X: first, Y: 100 * t.Ceiling},
		{X: last, Y: 100 * t.Ceiling}})
	if err != nil {
		return nil, err
	}
	ceiling.Color, ceiling.Dashes = color.Gray{110}, []vg.Length{4, 3}
	panel.Add(ceiling)
	if legend {
		panel.Legend.Add("never evicts", ceiling)
	}
	panel.Y.Min, panel.Y.Max = 0, math.Max(103*t.Ceiling, 1)
	panel.X.Min, panel.X.Max = first/1.1, last*1.1
	return panel, nil
}

// ticks marks the capacities, and labels those that are far enough from the last label.
type ticks []int

func (c ticks) Ticks(low, high float64) []plot.Tick {
	var marks []plot.Tick
	named := 0.0
	for _, n := range slices.Compact(slices.Sorted(slices.Values(c))) {
		mark := plot.Tick{Value: float64(n)}
		if named == 0 || float64(n) > named*math.Pow(high/low, 0.09) {
			mark.Label, named = simulate.FormatBlocks(n), float64(n)
		}
		marks = append(marks, mark)
	}
	return marks
}
