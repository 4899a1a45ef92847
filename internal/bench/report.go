// Package bench has the form in which every bench reports its figures.
package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"text/tabwriter"
)

// A Report is what a bench prints. bench/_report.py writes the same form.
type Report struct {
	Benchmark string `json:"benchmark"`
	Cases     []Case `json:"cases"`
}

// A Case is one figure. Limit, Ratio and Spread are nil if it has no limit.
type Case struct {
	Name   string   `json:"name"`
	Value  float64  `json:"value"`
	Unit   string   `json:"unit"`
	Limit  *float64 `json:"limit"`  // in the same unit, of the same run
	Ratio  *float64 `json:"ratio"`  // value / limit
	Spread *float64 `json:"spread"` // distance between the quartiles of the rounds' ratios
}

// NewReport returns an empty report of the bench with this name.
func NewReport(benchmark string) *Report {
	return &Report{Benchmark: benchmark, Cases: []Case{}}
}

// Add adds a figure without a limit.
func (r *Report) Add(name string, value float64, unit string) {
	r.Cases = append(r.Cases, Case{Name: name, Value: *short(value), Unit: unit})
}

// Rounds adds the median of a figure's rounds beside that of their limits. There is one limit for
// each round, and at least one round.
func (r *Report) Rounds(name, unit string, values, limits []float64) {
	ratios := make([]float64, len(values))
	for i, v := range values {
		ratios[i] = v / limits[i]
	}
	value, limit := Quantile(values, 0.5), Quantile(limits, 0.5)
	r.Cases = append(r.Cases, Case{name, *short(value), unit, short(limit),
		short(value / limit),
		short(Quantile(ratios, 0.75) - Quantile(ratios, 0.25))})
}

// Print prints a table to stderr and then the JSON, as one line, to stdout. If file is not empty,
// the JSON is written to that file as well.
func (r *Report) Print(stdout, stderr io.Writer, file string) error {
	t := tabwriter.NewWriter(stderr, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tvalue\t\tlimit\tratio\tspread\t")
	for _, c := range r.Cases {
		fmt.Fprintf(t, "%s\t%.5g\t%s\t", c.Name, c.Value, c.Unit)
		if c.Limit != nil {
			fmt.Fprintf(t, "%.5g\t%.3f\t%.3f\t", *c.Limit, *c.Ratio, *c.Spread)
		} else {
			fmt.Fprint(t, "\t\t\t")
		}
		fmt.Fprintln(t)
	}
	err := errors.Join(t.Flush(), json.NewEncoder(stdout).Encode(r))
	if err != nil || file == "" {
		return err
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	indented := json.NewEncoder(f)
	indented.SetIndent("", "  ")
	return errors.Join(indented.Encode(r), f.Close())
}

// Quantile returns the value below which the part q of the values lies. It interpolates between
// neighbouring values. There must be at least one value.
func Quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	i := min(int(at), max(len(sorted)-2, 0))
	j := min(i+1, len(sorted)-1)
	return sorted[i] + (sorted[j]-sorted[i])*(at-float64(i))
}

// short returns a value with five digits: no bench is more exact than that.
func short(v float64) *float64 {
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 5, 64), 64)
	return &v
}
