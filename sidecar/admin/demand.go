package admin

import (
	"fmt"
	"io"
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"lookaside/internal/bytesize"
	"lookaside/internal/demand"
	"lookaside/tiers/engine"
)

// DemandStatus describes what clients ask for, and what an arena of another size would do for them.
type DemandStatus struct {
	Watched bool `json:"watched" doc:"Whether anything is watched: demand.memory is not 0."`
	// Sample is the part of all chunks that the curve is made of.
	Sample     float64 `json:"sample" doc:"The part of all chunks that the curve is made of; 1 unless demand.memory is small for the arena."`
	SinceS     float64 `json:"since_s" doc:"How long ago the curve began: at the start, or when the arena got another size."`
	AskedPages uint64  `json:"asked_pages" doc:"Pages looked up since then."`
	Measured   float64 `json:"measured_hit_ratio" doc:"The part of the pages looked up in the last hour or so that the arena held."`
	// Curve is empty before the first lookup.
	Curve   []CurvePoint `json:"curve" doc:"What arenas of other sizes would have hit, from a simulation of arena.eviction."`
	Dropped uint64       `json:"dropped_requests" doc:"Requests that were not watched or recorded, for want of time."`
	// ResidenceS and ReuseS are medians.
	ResidenceS float64 `json:"residence_median_s" doc:"Half of the chunks evicted for room had been in the arena for no longer, to within a factor of 4; 0: none was evicted, -1: beyond the largest bound."`
	ReuseS     float64 `json:"reuse_median_s" doc:"Half of the chunks that were asked for again were so after no longer, to within a factor of 2; 0: none was, -1: beyond the largest bound."`
	ReuseBytes float64 `json:"reuse_distance_median_bytes" doc:"Half of the chunks that were asked for again were so after no more bytes of other chunks, to within a factor of 2; 0: none was, -1: beyond the largest bound."`
}

// CurvePoint is one size of the arena.
type CurvePoint struct {
	Multiple float64 `json:"multiple" doc:"The size, in arenas."`
	Bytes    int64   `json:"bytes"`
	HitRatio float64 `json:"hit_ratio" doc:"The part of the pages looked up in the last hour or so that it would have held."`
	Gain     float64 `json:"gain" doc:"Its hit ratio less that of the arena's own size."`
	Full     bool    `json:"full" doc:"Whether it has had to evict. What is not full does no more than hold everything since the curve began."`
}

func (o *Operations) demandStatus() DemandStatus {
	st := DemandStatus{Curve: []CurvePoint{}, Dropped: o.Demand.Dropped(),
		ResidenceS: residenceMedian(o.Engine.Residence())}
	c, ok := o.Demand.Curve()
	r, _ := o.Demand.Reuse()
	if !ok {
		return st
	}
	st.Watched, st.Sample, st.AskedPages, st.Measured = true, c.Rate, c.Asked, c.Measured
	st.ReuseS = median(r.Seconds[:], demand.SecondsBound)
	st.ReuseBytes = median(r.Bytes[:], demand.BytesBound)
	if !c.Since.IsZero() {
		st.SinceS = time.Since(c.Since).Seconds()
	}
	own := 0.0
	for _, p := range c.Points {
		if p.Multiple == 1 {
			own = p.Ratio
		}
	}
	for _, p := range c.Points {
		st.Curve = append(st.Curve, CurvePoint{p.Multiple, p.Bytes, p.Ratio, p.Ratio - own, p.Full})
	}
	return st
}

func residenceMedian(r engine.Residence) float64 {
	return median(r.Counts[:], engine.ResidenceBound)
}

// median returns the bound of the bucket that has the median; the last bucket has no bound.
func median(counts []uint64, bound func(int) float64) float64 {
	total, sum := uint64(0), uint64(0)
	for _, n := range counts {
		total += n
	}
	if total == 0 {
		return 0
	}
	for i, n := range counts[:len(counts)-1] {
		if sum += n; 2*sum >= total {
			return bound(i)
		}
	}
	return -1
}

// advice says in words what other sizes would give, or what is not known yet.
func (d *DemandStatus) advice() string {
	if !d.Watched {
		return "not watched (demand.memory is 0)"
	}
	if len(d.Curve) == 0 || d.AskedPages == 0 {
		return "nothing was looked up so far"
	}
	text, own := "", CurvePoint{}
	for _, p := range d.Curve {
		if p.Multiple == 1 {
			own = p
			break
		}
	}
	for _, p := range d.Curve {
		switch p.Multiple {
		case 0.5:
			text += fmt.Sprintf("half the memory would give %s of hits, ", points(p.Gain))
		case 2:
			text += "twice " + points(p.Gain)
		case 4:
			text += ", four times " + points(p.Gain)
		case 8:
			text += ", eight times " + points(p.Gain)
		}
	}
	if !own.Full {
		return fmt.Sprintf("as all that was asked for in %s fits, more memory would give nothing; %s",
			(time.Duration(d.SinceS) * time.Second).Round(time.Second), text)
	}
	return text
}

// points writes a difference of ratios.
func points(d float64) string {
	n := math.Round(100 * d)
	if n == 0 {
		n = 0 // not -0
	}
	return fmt.Sprintf("%+.0f %%", n)
}

// write writes the lines of the status for people.
func (d *DemandStatus) write(row func(name, format string, args ...any)) {
	row("other sizes", "%s", d.advice())
	if d.ReuseBytes != 0 {
		row("reuse", "half within %s and %s of other chunks; chunks evicted for room had been there for %s",
			seconds(d.ReuseS, demand.SecondsBound(demand.ReuseBuckets-1)), distance(d.ReuseBytes),
			seconds(d.ResidenceS, engine.ResidenceBound(engine.ResidenceBuckets-1)))
	}
}

func seconds(s, most float64) string {
	switch {
	case s < 0:
		return "more than " + (time.Duration(most) * time.Second).String()
	case s == 0:
		return "unknown (none was)"
	}
	return (time.Duration(s) * time.Second).String()
}

func distance(b float64) string {
	if b < 0 {
		return "more than " + bytesize.Format(int64(demand.BytesBound(demand.ReuseBuckets-1)))
	}
	return bytesize.Format(int64(b))
}

// writeCurve writes the curve as a table.
func (d *DemandStatus) writeCurve(w io.Writer) {
	if len(d.Curve) == 0 || d.AskedPages == 0 {
		return
	}
	fmt.Fprintln(w, "\nARENA\tSIZE\tHIT RATIO\tAGAINST NOW\t")
	for _, p := range d.Curve {
		note := ""
		if !p.Full {
			note = "never full"
		}
		fmt.Fprintf(w, "× %v\t%s\t%.1f %%\t%s\t%s\n", p.Multiple, bytesize.Format(p.Bytes),
			100*p.HitRatio, points(p.Gain), note)
	}
}

// collectDemand adds the histograms and the curve.
func (c *collector) collectDemand(ch chan<- prometheus.Metric, count func(string, uint64,
	...string)) {
	histogram := func(name string, counts []uint64, sum float64, bound func(int) float64) {
		buckets, total := map[float64]uint64{}, uint64(0)
		for i, n := range counts {
			if total += n; i < len(counts)-1 {
				buckets[bound(i)] = total
			}
		}
		ch <- prometheus.MustNewConstHistogram(c.descs[name], total, sum, buckets)
	}
	res := c.o.Engine.Residence()
	histogram("lookaside_residence_seconds", res.Counts[:], res.Seconds, engine.ResidenceBound)
	count("lookaside_demand_dropped_requests_total", c.o.Demand.Dropped())
	if r, ok := c.o.Demand.Reuse(); ok {
		histogram("lookaside_reuse_seconds", r.Seconds[:], r.SumSeconds, demand.SecondsBound)
		histogram("lookaside_reuse_distance_bytes", r.Bytes[:], r.SumBytes, demand.BytesBound)
		count("lookaside_first_use_chunks_total", r.First)
	}
	curve, ok := c.o.Demand.Curve()
	if !ok || len(curve.Points) == 0 {
		return
	}
	count("lookaside_curve_asked_pages_total", curve.Asked)
	for _, p := range curve.Points {
		count("lookaside_curve_missed_pages_total", p.Missed, fmt.Sprint(p.Multiple))
	}
}
