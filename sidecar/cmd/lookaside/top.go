package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	tea "charm.land/bubbletea/v2"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/charmbracelet/x/term"
	"github.com/spf13/cobra"

	"lookaside/connector"
	"lookaside/internal/bytesize"
	"lookaside/sidecar/admin"
)

// topTimeout bounds the wait for each sidecar.
const topTimeout = 2 * time.Second

func newTop() *cobra.Command {
	var (
		c     control
		once  bool
		every time.Duration
	)
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the sidecars of this host, live",
		Long: `Show the sidecars of this host, live: hit ratio, tokens and time saved, arena, tiers, misses,
tenants, evictions and sessions. The dashboard (docs/dashboard.md) shows the same in a browser.

Keys: up and down (or k and j) choose a sidecar, PgUp and PgDn scroll, space pauses, r asks at once,
? lists the keys, q and Ctrl-C end.

With --admin it shows the sidecars of another host, or of a container, as the one there sees them.

Without a terminal, or with --once, one snapshot is printed; --json prints it as JSON.`,
		Example: "  lookaside top\n  lookaside top --once --json | jq '.[].status.loaded_ratio'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return fmt.Errorf("--every is %s: want 100ms or more", every)
			}
			states, err := c.hostStates(cmd)
			if err != nil {
				return err
			}
			m := &top{host: states, every: every, now: time.Now}
			live := term.IsTerminal(os.Stdout.Fd()) && term.IsTerminal(os.Stdin.Fd())
			if once || c.asJSON || !live {
				msg := m.ask().(topAnswer)
				if msg.err != nil {
					return msg.err
				}
				return c.print(cmd, msg.states, func(w io.Writer) error {
					m.take(msg)
					_, err := fmt.Fprintln(w, strings.Join(m.all(), "\n"))
					return err
				})
			}
			_, err = tea.NewProgram(m, tea.WithContext(cmd.Context())).Run()
			return err
		},
	}
	cmd.Flags().BoolVar(&once, "once", false, "print one snapshot and end")
	cmd.Flags().DurationVar(&every, "every", 2*time.Second, "how often to ask the sidecars")
	c.flags(cmd)
	return cmd
}

// top is what the terminal shows. Only the program's goroutine uses it, but for ask.
type top struct {
	host  func(context.Context) ([]admin.HostState, error)
	every time.Duration
	now   func() time.Time

	states []admin.HostState
	err    error
	at     time.Time // of the last answer
	chosen string    // endpoint
	paused bool
	keys   bool // they are shown
	scroll int  // lines of the details that are above the screen
	width  int
	height int
}

// topAnswer is what the sidecars said.
type topAnswer struct {
	states []admin.HostState
	err    error
	ticks  bool // asked because it was time
}

type topTick struct{}

// ask asks all sidecars.
func (m *top) ask() tea.Msg {
	ctx, cancel := context.WithTimeout(context.Background(), topTimeout)
	defer cancel()
	states, err := m.host(ctx)
	return topAnswer{states: states, err: err}
}

func (m *top) askInTime() tea.Msg {
	msg := m.ask().(topAnswer)
	msg.ticks = true
	return msg
}

// Init implements tea.Model.
func (m *top) Init() tea.Cmd { return m.askInTime }

// Update implements tea.Model.
func (m *top) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case topAnswer:
		if !m.paused {
			m.take(msg)
		}
		if msg.ticks {
			return m, tea.Tick(m.every, func(time.Time) tea.Msg { return topTick{} })
		}
	case topTick:
		if m.paused {
			return m, tea.Tick(m.every, func(time.Time) tea.Msg { return topTick{} })
		}
		return m, m.askInTime
	case tea.KeyPressMsg:
		return m, m.press(msg.String())
	}
	return m, nil
}

// press handles a key.
func (m *top) press(key string) tea.Cmd {
	switch key {
	case "q", "ctrl+c":
		return tea.Quit
	case "up", "k":
		m.move(-1)
	case "down", "j":
		m.move(1)
	case "pgup":
		m.scroll = max(0, m.scroll-10)
	case "pgdown":
		m.scroll += 10
	case "space":
		m.paused = !m.paused
	case "?":
		m.keys = !m.keys
	case "r":
		m.paused = false
		return m.ask
	}
	return nil
}

// take takes over what the sidecars said.
func (m *top) take(msg topAnswer) {
	m.at, m.err = m.now(), msg.err
	if msg.err != nil {
		return
	}
	m.states = msg.states
	if m.index() < 0 && len(m.states) > 0 {
		m.chosen, m.scroll = m.states[0].Endpoint, 0
	}
}

// index returns the place of the chosen sidecar; -1: it is not there.
func (m *top) index() int {
	return slices.IndexFunc(m.states, func(s admin.HostState) bool {
		return s.Endpoint == m.chosen
	})
}

func (m *top) move(by int) {
	if len(m.states) > 0 {
		i := min(max(m.index()+by, 0), len(m.states)-1)
		m.chosen, m.scroll = m.states[i].Endpoint, 0
	}
}

var (
	topBold  = lipgloss.NewStyle().Bold(true)
	topDim   = lipgloss.NewStyle().Faint(true)
	topBad   = lipgloss.NewStyle().Foreground(lipgloss.Red)
	topGood  = lipgloss.NewStyle().Foreground(lipgloss.Green)
	topHere  = lipgloss.NewStyle().Reverse(true)
	topWords = "up/down choose   PgUp/PgDn scroll   space pause   r ask now   ? keys   q quit"
)

// View implements tea.Model.
func (m *top) View() tea.View {
	head, body := m.head(), m.details()
	foot := topDim.Render("q quit   ? keys")
	if m.keys {
		foot = topDim.Render(topWords)
	}
	room := max(0, m.height-len(head)-1)
	m.scroll = min(m.scroll, max(0, len(body)-room))
	body = body[m.scroll:min(len(body), m.scroll+room)]
	lines := append(head, body...)
	if m.height > 0 {
		lines = lines[:min(len(lines), m.height-1)]
		for len(lines) < m.height-1 {
			lines = append(lines, "")
		}
	}
	lines = append(lines, foot)
	for i := range lines {
		lines[i] = ansi.Truncate(lines[i], max(m.width, 1), "…")
	}
	v := tea.NewView(strings.Join(lines, "\n"))
	v.AltScreen, v.WindowTitle = true, "lookaside top"
	return v
}

// all returns the lines of a snapshot: every sidecar with its details.
func (m *top) all() []string {
	lines := m.head()
	for _, s := range m.states {
		m.chosen = s.Endpoint
		lines = append(append(lines, ""), m.details()...)
	}
	for i, line := range lines {
		lines[i] = strings.TrimRight(ansi.Strip(line), " ")
	}
	return lines
}

// head returns the lines with all sidecars.
func (m *top) head() []string {
	state := "asking"
	if !m.at.IsZero() {
		state = m.at.Format(time.TimeOnly)
	}
	if m.paused {
		state = "paused at " + state
	}
	title := topBold.Render("lookaside top") + fmt.Sprintf("   %s   %s", state,
		plural(len(m.states), "sidecar"))
	if m.err != nil {
		return []string{title, topBad.Render(m.err.Error()), ""}
	}
	if len(m.states) == 0 && !m.at.IsZero() {
		return []string{title, "no sidecar runs on this host", ""}
	}
	rows := [][]string{{"SIDECAR", "PID", "ARENA", "LOADED", "SAVED/S", "UP", "HOW IT IS"}}
	for _, s := range m.states {
		if s.Status == nil {
			rows = append(rows, []string{s.Endpoint, pidText(s.PID), "?", "?", "?", "?", s.Error})
			continue
		}
		last := s.Status.LastMinute
		rows = append(rows, []string{s.Endpoint, pidText(s.PID),
			bytesize.Format(s.Arena.UsedBytes) + " of " + bytesize.Format(s.Arena.LimitBytes),
			ratio(last.Tokens.Loaded, last.Tokens.Asked),
			perSecond(last.Tokens.Loaded, last.Seconds),
			time.Duration(s.UptimeS * float64(time.Second)).Round(time.Second).String(), s.Verdict})
	}
	lines := columns(rows)
	lines[0] = topDim.Render(lines[0])
	if i := m.index(); i >= 0 {
		lines[i+1] = topHere.Render(lines[i+1])
	}
	return append(append([]string{title}, lines...), "")
}

// details returns the lines with the chosen sidecar.
func (m *top) details() []string {
	i := m.index()
	if i < 0 {
		return nil
	}
	st := m.states[i].Status
	if st == nil {
		return []string{topBold.Render(m.chosen), topBad.Render(m.states[i].Error)}
	}
	n, t, last := st.Counters, st.Counters.Tokens, st.LastMinute
	health := topGood
	if !strings.HasPrefix(st.Verdict, "healthy") {
		health = topBad
	}
	lines := []string{topBold.Render(m.chosen), health.Render(st.Verdict), ""}
	used := 0.0
	if st.Arena.LimitBytes > 0 {
		used = float64(st.Arena.UsedBytes) / float64(st.Arena.LimitBytes)
	}
	lines = append(lines, columns([][]string{
		{"arena", meter(used) + fmt.Sprintf(" %s of %s, %d pages, %d leases",
			bytesize.Format(st.Arena.UsedBytes), bytesize.Format(st.Arena.LimitBytes), st.Pages,
			st.Leases)},
		{"tokens", fmt.Sprintf("%d asked for in %d requests: %d loaded (%s), %d computed; vLLM's own cache had %d",
			t.Asked, t.Requests, t.Loaded, ratio(t.Loaded, t.Asked), t.Computed, t.Own)},
		{"TTFT saved", savedTime(n)},
		{"last minute", fmt.Sprintf("%d requests, %s loaded, %.1f s saved; %s stored, %s loaded a second",
			last.Tokens.Requests, ratio(last.Tokens.Loaded, last.Tokens.Asked), last.Saved.TTFTS,
			bytesPerSecond(last.StoredBytes, last.Seconds),
			bytesPerSecond(last.LoadedBytes, last.Seconds))},
		{"shed", fmt.Sprintf("%d pages found no room", n.ShedPages)},
	})...)
	tiers := [][]string{{"TIER", "STATE", "USED", "ASKED PAGES", "HIT PAGES", "HIT RATIO", "LOADED",
		"STORED", "QUEUED", "FAILED"}, {"arena", strings.Replace(st.Arena.State, "ready", "on", 1),
		bytesize.Format(st.Arena.UsedBytes), fmt.Sprint(st.ArenaHits.LookupPages),
		fmt.Sprint(st.ArenaHits.HitPages), ratio(st.ArenaHits.HitPages, st.ArenaHits.LookupPages),
		bytesize.Format(int64(n.LoadedBytes)), bytesize.Format(int64(n.StoredBytes)), "-", "-"}}
	for _, x := range st.Tiers {
		state, used := x.State, "?"
		if state == "closed" {
			state = "on"
		}
		if x.UsedBytes >= 0 {
			used = bytesize.Format(x.UsedBytes)
		}
		tiers = append(tiers, []string{x.Name, state, used, fmt.Sprint(x.LookupPages),
			fmt.Sprint(x.HitPages), ratio(x.HitPages, x.LookupPages),
			bytesize.Format(int64(x.LoadedBytes)), bytesize.Format(int64(x.StoredBytes)),
			fmt.Sprint(x.LoadQueue + x.StoreQueue),
			fmt.Sprint(x.LookupFailures + x.LoadFailures + x.StoreFailures)})
	}
	lines = append(lines, titled(tiers)...)
	fixes := map[string]string{}
	for _, m := range admin.MissReasons() {
		fixes[m.Reason] = m.Fix
	}
	misses := [][]string{{"PREFIX ENDED", "TIMES", "PAGES MISSED", "WHAT TO DO"}}
	for _, name := range byCount(st.Misses, func(r string) uint64 { return st.Misses[r].Ends }) {
		misses = append(misses, []string{name, fmt.Sprint(st.Misses[name].Ends),
			fmt.Sprint(st.Misses[name].Pages), cmp.Or(fixes[name], "nothing")})
	}
	tenants := [][]string{{"TENANT", "ASKED TOKENS", "HIT TOKENS", "HIT RATIO", "IN ARENA", "SHARE",
		"EVICTED", "SHED PAGES"}}
	for _, x := range st.Tenants {
		share := "-"
		if x.Arena.ShareBytes > 0 {
			share = bytesize.Format(x.Arena.ShareBytes)
		}
		tenants = append(tenants, []string{cmp.Or(x.Name, "(none)"), fmt.Sprint(x.AskedTokens),
			fmt.Sprint(x.HitTokens), ratio(x.HitTokens, x.AskedTokens),
			bytesize.Format(x.Arena.UsedBytes), share, fmt.Sprint(x.Arena.Evictions),
			fmt.Sprint(x.ShedPages)})
	}
	evictions := [][]string{{"EVICTED", "CHUNKS"}}
	for _, cause := range byCount(st.Evictions, func(c string) uint64 { return st.Evictions[c] }) {
		evictions = append(evictions, []string{cause, fmt.Sprint(st.Evictions[cause])})
	}
	sessions := [][]string{{"SESSION", "ROLE", "ENGINE", "RANK", "PID", "SPACE"}}
	for _, s := range st.Sessions {
		sessions = append(sessions, []string{s.Session, s.Role, s.EngineID, fmt.Sprint(s.Rank),
			fmt.Sprint(s.PID), s.Space})
	}
	for _, table := range [][][]string{misses, tenants, evictions, sessions} {
		if len(table) > 1 {
			lines = append(lines, titled(table)...)
		}
	}
	return lines
}

// savedTime writes what loads saved.
func savedTime(n connector.Counters) string {
	s := n.Saved
	if s.UnpricedTokens == n.Tokens.Loaded {
		return "not known: no loaded tokens, or vLLM has not measured its prefills"
	}
	return fmt.Sprintf("%.1f s, estimated: %.1f s of computing less %.1f s of lookups and %.1f s of loads",
		s.TTFTS, s.ComputeS, s.LookupS, s.LoadS)
}

// titled returns an empty line and a table.
func titled(rows [][]string) []string {
	lines := columns(rows)
	lines[0] = topDim.Render(lines[0])
	return append([]string{""}, lines...)
}

// byCount returns the keys whose count is not 0, the highest first.
func byCount[V any](m map[string]V, of func(string) uint64) []string {
	var keys []string
	for k := range m {
		if of(k) > 0 {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b string) int {
		return cmp.Or(cmp.Compare(of(b), of(a)), strings.Compare(a, b))
	})
	return keys
}

// columns aligns rows.
func columns(rows [][]string) []string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush() // to memory
	return strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
}

// meter draws a part of 1.
func meter(part float64) string {
	const width = 20
	n := min(max(int(part*width+0.5), 0), width)
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", width-n) + "]"
}

func pidText(pid int) string {
	if pid == 0 {
		return "?"
	}
	return fmt.Sprint(pid)
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprint(n, " ", what, "s")
}

func ratio(part, of uint64) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(of))
}

func perSecond(n uint64, seconds float64) string {
	return fmt.Sprintf("%.0f", float64(n)/max(seconds, 1))
}

func bytesPerSecond(n uint64, seconds float64) string {
	return bytesize.Format(int64(float64(n) / max(seconds, 1)))
}
