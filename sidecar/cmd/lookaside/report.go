package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// benchReport is what every bench prints, those in bench/ too: see bench/_report.py.
type benchReport struct {
	Benchmark string      `json:"benchmark"`
	Cases     []benchCase `json:"cases"`
}

// benchCase is one figure. Limit, Ratio and Spread are nil where it has no limit.
type benchCase struct {
	Name   string   `json:"name"`
	Value  float64  `json:"value"`
	Unit   string   `json:"unit"`
	Limit  *float64 `json:"limit"`  // in the same unit, of the same run
	Ratio  *float64 `json:"ratio"`  // value / limit
	Spread *float64 `json:"spread"` // distance between the quartiles of the rounds' ratios
}

func newBenchReport(benchmark string) *benchReport {
	return &benchReport{Benchmark: benchmark, Cases: []benchCase{}}
}

// add adds a figure without a limit.
func (r *benchReport) add(name string, value float64, unit string) {
	r.Cases = append(r.Cases, benchCase{Name: name, Value: *short(value), Unit: unit})
}

// rounds adds the median of a figure's rounds beside that of their limits. There is one limit a
// round, and a round at least.
func (r *benchReport) rounds(name, unit string, values, limits []float64) {
	ratios := make([]float64, len(values))
	for i, v := range values {
		ratios[i] = v / limits[i]
	}
	value, limit := quantile(values, 0.5), quantile(limits, 0.5)
	r.Cases = append(r.Cases, benchCase{name, *short(value), unit, short(limit),
		short(value / limit),
		short(quantile(ratios, 0.75) - quantile(ratios, 0.25))})
}

// print prints a table to standard error and, last, the JSON to standard output; with a file named,
// that gets the JSON too.
func (r *benchReport) print(cmd *cobra.Command, file string) error {
	t := tabwriter.NewWriter(cmd.ErrOrStderr(), 0, 8, 2, ' ', tabwriter.AlignRight)
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
	if err := errors.Join(t.Flush(), json.NewEncoder(cmd.OutOrStdout()).Encode(r)); err != nil ||
		file == "" {
		return err
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	return errors.Join(printJSON(f, r), f.Close())
}

func addJSONFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "json", "", "also write the figures to this `file`")
}

// quantile interpolates between the values on both sides; there must be one at least.
func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	i := min(int(at), max(len(sorted)-2, 0))
	j := min(i+1, len(sorted)-1)
	return sorted[i] + (sorted[j]-sorted[i])*(at-float64(i))
}

// short is a value with five digits: no bench is more exact than that.
func short(v float64) *float64 {
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 5, 64), 64)
	return &v
}
