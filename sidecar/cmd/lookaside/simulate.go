package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"lookaside/internal/bytesize"
	"lookaside/internal/recording"
	"lookaside/internal/simulate"
	"lookaside/tiers/policy"
)

func newSimulate() *cobra.Command {
	var o simulation
	cmd := &cobra.Command{
		Use:   "simulate FILE …",
		Short: "Replay recorded requests to see how much memory and which tiers would help",
		Long: `Replay requests to see how many of their pages an arena of another size would hit, with and without a
tier below it, or with another order of eviction. A FILE is one of two things; "-" is standard
input.

A recording, as lookaside record makes it; the files of one that has several are joined. Then the answer is a table: a row for each size of the
arena (--memory; by default a quarter of what it was to eight times that), and a column for each
size of a tier below it (--tier; by default none, four and sixteen times the arena). What the tier
is, a disk or another, does not matter: the table says what would be held, not how fast it comes.
The tier takes what --admit says, and what only it has comes up to the arena when it is asked for.
With several, a table compares what the tier hits and what is written to it. second-sight and oracle
are no settings: the one writes what was asked for before, with a memory that has no end, the other
what will be asked for again. What the sidecar found while it was recorded stands
above the table: compare it with the row of its size.

Or a trace of JSON objects, one a line, each with hash_ids: a list of whole numbers, one for each
block of the request's prompt, where equal beginnings of lists are equal prefixes. This is the form
in which Mooncake publishes traces; other fields are ignored. Sizes are in those blocks (--capacity,
with k and m for thousands and millions; so are those of --tier), and the table compares policies.
With tiers it compares what --admit names.

The ratio is that of blocks that hit to all blocks that are looked up: a block hits if it and all
before it in its request are held. Requests are replayed one after another, and shares of sessions
and tenants, hints and pins do not count.`,
		Example: `  lookaside record --for 1h requests.lkt
  lookaside simulate requests.lkt
  lookaside simulate requests.lkt --memory 32G,64G,128G --tier 0,500G,2T
  lookaside simulate requests.lkt --policy lru,adaptive
  lookaside simulate requests.lkt --tier 500G --admit stored,evicted,learned
  lookaside simulate trace.jsonl --capacity 1k,10k,100k --format json
  lookaside simulate trace.jsonl --capacity 2k --tier 4k,10k,40k --admit all`,
		Args: cobra.MinimumNArgs(1),
		RunE: o.run,
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.memory, "memory", nil,
		"of a recording: sizes of the arena, such as 32G (default: 1/4 to 8 times the recorded one)")
	f.StringSliceVar(&o.tiers, "tier", nil,
		"sizes of a tier below, 0 for none (default of a recording: 0, 4 and 16 times the arena)")
	f.StringSliceVar(&o.admits, "admit", []string{"stored"},
		"what the tier takes: "+strings.Join(admitNames(), ", ")+", or all")
	f.StringSliceVar(&o.capacities, "capacity", []string{"500", "1k", "2k", "5k", "10k", "20k",
		"30k", "50k"}, "of other traces: capacities in blocks")
	f.StringSliceVar(&o.policies, "policy", nil, "policies: "+strings.Join(policy.Names(),
		", ")+", or all (default: "+policy.Default+" for recordings, all for other traces)")
	f.StringVar(&o.format, "format", "table", "what to print: table or json")
	f.Uint64Var(&o.seed, "seed", 1, "seed of the policies' hash functions and samples")
	return cmd
}

// simulation is the flags of the command.
type simulation struct {
	memory, tiers, capacities, policies []string
	admits                              []string
	format                              string
	seed                                uint64
}

// run is the command.
func (o *simulation) run(cmd *cobra.Command, args []string) error {
	if o.format != "table" && o.format != "json" {
		return fmt.Errorf("--format %s: want table or json", o.format)
	}
	admits, err := o.admissions()
	if err != nil {
		return err
	}
	for _, name := range o.policies {
		if _, err := policy.New(name, policy.Options{}); name != "all" && (err != nil ||
			name == "") {
			return fmt.Errorf("--policy: no eviction policy %q: there are %s", name,
				strings.Join(policy.Names(), ", "))
		}
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var capacities []int
	for _, text := range o.capacities {
		n, err := parseBlocks(text)
		if err != nil {
			return fmt.Errorf("--capacity: %w", err)
		}
		capacities = append(capacities, n)
	}
	memory, err := parseSizes("--memory", o.memory, 1)
	if err != nil {
		return err
	}
	traces, err := readTraces(args, cmd.InOrStdin())
	if err != nil {
		return err
	}
	blocks := simulate.Plan{Policies: o.named(policy.Names()), Seed: o.seed, Capacities: capacities,
		Admits: admits}
	var plans []simulate.Plan
	for _, t := range traces {
		r := t.Recorded()
		if r == nil {
			blocks.Traces = append(blocks.Traces, t)
			continue
		}
		tiers, err := parseSizes("--tier", o.tiers, 0)
		if err != nil {
			return err
		}
		plan := simulate.Plan{Traces: []*simulate.Trace{t}, Seed: o.seed,
			Policies: o.named([]string{policy.Default}), Admits: admits,
			Capacities: t.Slots(memory), Tiers: t.Slots(tiers)}
		if len(memory) == 0 {
			a := r.ArenaBytes
			plan.Capacities = t.Slots([]int64{a / 4, a / 2, a, 2 * a, 4 * a, 8 * a})
		}
		if len(tiers) == 0 {
			plan.Tiers = t.Slots([]int64{0, 4 * r.ArenaBytes, 16 * r.ArenaBytes})
		}
		plans = append(plans, plan)
	}
	if len(blocks.Traces) > 0 {
		if len(o.memory) > 0 {
			return fmt.Errorf("%s is no recording, so its blocks have no size: use --capacity instead of --memory", blocks.Traces[0].Name)
		}
		for _, text := range o.tiers {
			n, err := 0, error(nil)
			if text != "0" {
				n, err = parseBlocks(text)
			}
			if err != nil {
				return fmt.Errorf("--tier: %w", err)
			}
			blocks.Tiers = append(blocks.Tiers, n)
		}
		if len(o.tiers) > 0 && len(o.policies) == 0 {
			blocks.Policies = []string{policy.Default}
		}
		plans = append(plans, blocks)
	}
	report := simulate.Report{}
	for i, plan := range plans {
		plan.Progress = progressTo(cmd.ErrOrStderr(), 5*time.Second)
		results, err := plan.Run(ctx)
		if errors.Is(err, context.Canceled) {
			return errors.New("interrupted")
		} else if err != nil {
			return err
		}
		switch out := cmd.OutOrStdout(); {
		case o.format == "json":
			report.Add(plan, results)
		case plan.Traces[0].Recorded() != nil && len(plan.Admits) == 1:
			if i > 0 {
				fmt.Fprintln(out)
			}
			err = recordingTable(out, plan, results)
		case len(plan.Tiers) > 0:
			if i > 0 {
				fmt.Fprintln(out)
			}
			err = admitTable(out, plan, results)
		default:
			if i > 0 {
				fmt.Fprintln(out)
			}
			err = simulateTable(out, plan, results)
		}
		if err != nil {
			return err
		}
	}
	if o.format == "json" {
		return printJSON(cmd.OutOrStdout(), report)
	}
	return nil
}

// named returns the policies that the flag names.
func (o *simulation) named(otherwise []string) []string {
	switch {
	case len(o.policies) == 0:
		return otherwise
	case slices.Contains(o.policies, "all"):
		return policy.Names()
	}
	return o.policies
}

// admitNames returns the names of all admissions.
func admitNames() (names []string) {
	for _, a := range simulate.Admissions() {
		names = append(names, string(a))
	}
	return names
}

// admissions returns the admissions that the flag names.
func (o *simulation) admissions() (list []simulate.Admission, err error) {
	if slices.Contains(o.admits, "all") {
		return simulate.Admissions(), nil
	}
	for _, name := range o.admits {
		a, err := simulate.ParseAdmission(name)
		if err != nil {
			return nil, fmt.Errorf("--admit %s: %w, or all", name, err)
		}
		list = append(list, a)
	}
	return list, nil
}

// parseSizes parses sizes in bytes of at least least.
func parseSizes(flag string, texts []string, least int64) (sizes []int64, err error) {
	for _, text := range texts {
		n, err := int64(0), error(nil)
		if text != "0" {
			n, err = bytesize.Parse(text)
		}
		if err != nil || n < least {
			return nil, fmt.Errorf("%s %s: want a size such as 64G", flag, text)
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
}

// recordingTable prints a table of a recording for each policy.
func recordingTable(w io.Writer, plan simulate.Plan, results []simulate.Result) error {
	t := plan.Traces[0]
	r := t.Recorded()
	asked, distinct := t.Blocks()
	size := func(slots int) string { return bytesize.Format(int64(slots) * t.ChunkBytes()) }
	fmt.Fprintf(w, "%s: %d lookups and %d stores in %s; %d pages of %s and %d tokens were looked up, %d are distinct\n",
		t.Name, r.Lookups, r.Stores, time.Duration(r.Seconds*float64(time.Second)).Round(
			time.Second), asked, bytesize.Format(r.PageBytes), r.PageTokens, distinct)
	fmt.Fprintf(w, "the sidecar held %s of them, %s in tiers or at peers, with an arena of %s; one that never evicts would hold %s\n",
		share(r.HeldPages, asked), share(r.TierPages, asked), bytesize.Format(r.ArenaBytes),
		fmt.Sprintf("%.1f %%", 100*t.Ceiling()))
	if r.OtherPages > 0 {
		fmt.Fprintf(w, "left out: %d pages of other sizes\n", r.OtherPages)
	}
	if r.Dropped > 0 {
		fmt.Fprintf(w, "missing: %d requests that there was no time to record\n", r.Dropped)
	}
	if r.Cut {
		fmt.Fprintln(w, "the end of the recording is missing: its writer was killed, or still writes")
	}
	n := len(plan.Capacities)
	for i, name := range plan.Policies {
		fmt.Fprintf(w, "\n%s\n", name)
		table := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
		fmt.Fprint(table, "arena\t")
		for _, tier := range plan.Tiers {
			if tier == 0 {
				fmt.Fprint(table, "no tier\t")
			} else {
				fmt.Fprintf(table, "tier of %s\t", size(tier))
			}
		}
		fmt.Fprintln(table)
		for j, slots := range plan.Capacities {
			fmt.Fprintf(table, "%s\t", size(slots))
			for k := range plan.Tiers {
				res := &results[(i*len(plan.Tiers)+k)*n+j]
				fmt.Fprintf(table, "%.1f %%\t", 100*res.Ratio())
			}
			fmt.Fprintln(table)
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func share(n, of int) string { return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(max(of, 1))) }

// parseBlocks parses a capacity: 500, 10k, 2.5k, 1m.
func parseBlocks(text string) (int, error) {
	number, unit := strings.ToLower(strings.TrimSpace(text)), 1.0
	for suffix, size := range map[string]float64{"k": 1e3, "m": 1e6} {
		if rest, ok := strings.CutSuffix(number, suffix); ok {
			number, unit = rest, size
			break
		}
	}
	v, err := strconv.ParseFloat(number, 64)
	if n := v * unit; err == nil && n >= 1 && n <= policy.SlotMask && n == math.Trunc(n) {
		return int(n), nil
	}
	return 0, fmt.Errorf("%q: want a whole number of blocks from 1 to %d, such as 500 or 10k", text,
		policy.SlotMask)
}

// readTraces reads all traces side by side, "-" from stdin. Each has the name of its file. Files of
// one recording are one trace, with the name of the first.
func readTraces(paths []string, stdin io.Reader) ([]*simulate.Trace, error) {
	if i := slices.Index(paths, "-"); i >= 0 && slices.Contains(paths[i+1:], "-") {
		return nil, errors.New("standard input can be read once only")
	}
	groups, err := groupParts(paths)
	if err != nil {
		return nil, err
	}
	traces, errs := make([]*simulate.Trace, len(groups)), make([]error, len(groups))
	var wg sync.WaitGroup
	for i, group := range groups {
		wg.Go(func() {
			if group[0] == "-" {
				traces[i], errs[i] = readTrace("standard input", stdin)
				return
			}
			files := make([]io.Reader, len(group))
			for k, path := range group {
				f, err := os.Open(path)
				if err != nil {
					errs[i] = err
					return
				}
				defer f.Close()
				files[k] = f
			}
			if traces[i], errs[i] = readTrace(group[0], files...); errs[i] == nil {
				traces[i].Name = strings.TrimSuffix(filepath.Base(group[0]), filepath.Ext(group[0]))
			}
		})
	}
	wg.Wait()
	return traces, errors.Join(errs...)
}

// groupParts puts the files of each recording together, in their order.
func groupParts(paths []string) (groups [][]string, err error) {
	type file struct {
		path string
		part recording.Part
	}
	at, parts := map[uint64]int{}, map[uint64][]file{}
	for _, path := range paths {
		var part recording.Part
		if path != "-" {
			if f, err := os.Open(path); err == nil { // errors are its reader's
				part = recording.PartOf(f)
				f.Close()
			}
		}
		if part.Number == 0 {
			groups = append(groups, []string{path})
			continue
		}
		if _, ok := at[part.ID]; !ok {
			at[part.ID] = len(groups)
			groups = append(groups, nil)
		}
		parts[part.ID] = append(parts[part.ID], file{path, part})
	}
	for id, files := range parts {
		slices.SortFunc(files, func(a, b file) int {
			return cmp.Compare(a.part.Number, b.part.Number)
		})
		for i, f := range files {
			if i > 0 && f.part.Number != files[i-1].part.Number+1 {
				return nil, fmt.Errorf("%s and %s are parts %d and %d of a recording: name each file between once",
					files[i-1].path, f.path, files[i-1].part.Number, f.part.Number)
			}
			groups[at[id]] = append(groups[at[id]], f.path)
		}
	}
	return groups, nil
}

// readTrace reads a recording, which may have several files, or another trace.
func readTrace(name string, in ...io.Reader) (*simulate.Trace, error) {
	b := bufio.NewReader(in[0])
	if begin, _ := b.Peek(8); recording.IsRecording(begin) {
		in[0] = b
		return simulate.ReadRecording(name, in...)
	}
	return simulate.Read(name, b)
}

// progressTo returns a function that writes a line about long runs, at most one in every interval.
func progressTo(w io.Writer, every time.Duration) func(done float64) {
	var mu sync.Mutex
	begun, last := time.Now(), time.Now()
	return func(done float64) {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); now.Sub(last) >= every && done > 0 && done < 1 {
			last = now
			left := time.Duration(float64(now.Sub(begun)) * (1 - done) / done)
			fmt.Fprintf(w, "simulated %.0f %%, some %s left\n", 100*done, left.Round(time.Second))
		}
	}
}

// admitTable prints for each trace and policy what a tier hits and what is written to it, by what
// it takes. The first admission is what the others are compared with.
func admitTable(w io.Writer, plan simulate.Plan, results []simulate.Result) error {
	n, m := len(plan.Capacities), len(plan.Capacities)*len(plan.Tiers)
	for i, t := range plan.Traces {
		asked, distinct := t.Blocks()
		size := simulate.FormatBlocks
		if t.Recorded() != nil {
			size = func(slots int) string { return bytesize.Format(int64(slots) * t.ChunkBytes()) }
		}
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s: %d requests, %d blocks, %d of them distinct; a cache that never evicts hits %.1f %% of them\n",
			t.Name, t.Requests(), asked, distinct, 100*t.Ceiling())
		for k, name := range plan.Policies {
			of := results[(i*len(plan.Policies)+k)*m*len(plan.Admits):]
			fmt.Fprintf(w, "\n%s; tier hits and writes against %s in brackets\n", name, plan.Admits[0])
			table := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
			fmt.Fprintln(table, "arena\ttier\tadmit\thits\tof the tier\t\twritten\t\t")
			for c := range plan.Capacities {
				for j, tier := range plan.Tiers {
					first := &of[j*n+c]
					for a := range plan.Admits {
						r := &of[a*m+j*n+c]
						if tier == 0 {
							fmt.Fprintf(table, "%s\tnone\t\t%.1f %%\t\t\t\t\t\n", size(r.Capacity),
								100*r.Ratio())
							break
						}
						fmt.Fprintf(table, "%s\t%s\t%s\t%.1f %%\t%.1f %%\t(%s)\t%d\t(%s)\t\n",
							size(r.Capacity), size(tier), r.Admit, 100*r.Ratio(),
							100*float64(r.TierHits)/float64(max(r.Blocks, 1)),
							against(r.TierHits, first.TierHits), r.TierWrites,
							against(r.TierWrites, first.TierWrites))
					}
				}
			}
			if err := table.Flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// against formats a number as a part of another.
func against(n, of int) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", float64(n)/float64(of))
}

// simulateTable prints a table for each trace and marks the best ratio of each capacity.
func simulateTable(w io.Writer, plan simulate.Plan, results []simulate.Result) error {
	for i, t := range plan.Traces {
		blocks, distinct := t.Blocks()
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s: %d requests, %d blocks, %d of them distinct; a cache that never evicts hits %.4f of them\n",
			t.Name, t.Requests(), blocks, distinct, t.Ceiling())
		of := results[i*len(plan.Policies)*len(plan.Capacities):][:len(plan.Policies)*len(
			plan.Capacities)]
		table := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
		fmt.Fprint(table, "blocks\t")
		for _, c := range plan.Capacities {
			fmt.Fprintf(table, "%s \t", simulate.FormatBlocks(c))
		}
		fmt.Fprintln(table)
		for k, name := range plan.Policies {
			fmt.Fprintf(table, "%s\t", name)
			for j := range plan.Capacities {
				hits, best := of[k*len(plan.Capacities)+j].Hits, 0
				for other := range plan.Policies {
					best = max(best, of[other*len(plan.Capacities)+j].Hits)
				}
				mark := " "
				if hits == best {
					mark = "*"
				}
				fmt.Fprintf(table, "%.4f%s\t", of[k*len(plan.Capacities)+j].Ratio(), mark)
			}
			fmt.Fprintln(table)
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	return nil
}
