package hitplot

import (
	"bytes"
	"image/png"
	"io"
	"strings"
	"testing"

	"lookaside/internal/simulate"
)

// report has two traces, two policies, and capacities that are not in order.
func report() simulate.Report {
	var r simulate.Report
	for _, trace := range []string{"one", "two"} {
		r.Traces = append(r.Traces, simulate.TraceReport{Name: trace, Ceiling: 0.6})
		for _, policy := range []string{"lru", "arc"} {
			for _, capacity := range []int{400, 100} {
				r.Results = append(r.Results, simulate.Outcome{
					Result: simulate.Result{Trace: trace, Policy: policy, Capacity: capacity},
					Ratio:  float64(capacity) / 1000})
			}
		}
	}
	return r
}

func TestDraw(t *testing.T) {
	for _, format := range []string{"png", "svg"} {
		var image bytes.Buffer
		if err := Draw(&image, format, report()); err != nil {
			t.Fatal(err)
		}
		if format == "png" {
			if _, err := png.Decode(&image); err != nil {
				t.Error(err)
			}
			continue
		}
		for _, want := range []string{"capacity (blocks)", "never evicts", "one", "two", "lru",
			"arc", "400"} {
			if !strings.Contains(image.String(), want) {
				t.Errorf("the image has no %q", want)
			}
		}
	}
}

func TestDrawRefuses(t *testing.T) {
	for want, spoil := range map[string]func(*simulate.Report){
		"no report of lookaside simulate": func(r *simulate.Report) { r.Results = nil },
		"7 results of 2 traces":           func(r *simulate.Report) { r.Results = r.Results[1:] },
		"not of \"two\"":                  func(r *simulate.Report) { r.Results[5].Trace = "one" },
		"capacity of 0 blocks":            func(r *simulate.Report) { r.Results[2].Capacity = 0 },
	} {
		r := report()
		spoil(&r)
		if err := Draw(io.Discard, "svg", r); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if err := Draw(io.Discard, "bmp", report()); err == nil {
		t.Error("a format that there is not")
	}
}
