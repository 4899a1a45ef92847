package main

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
)

// A terminal is a window of tmux, whose server is the test's own.
type terminal struct {
	t      *testing.T
	socket string
}

// newTerminal runs a command of a shell in a terminal.
func newTerminal(t *testing.T, columns, lines int, command string) *terminal {
	t.Helper()
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Fatal("tmux is missing: scripts/setup.sh test")
	}
	w := &terminal{t, filepath.Join(t.TempDir(), "tmux")}
	w.tmux("-f", "/dev/null", "new-session", "-d", "-x", fmt.Sprint(columns), "-y",
		fmt.Sprint(lines), command)
	t.Cleanup(func() { _ = exec.Command("tmux", "-S", w.socket, "kill-server").Run() })
	return w
}

func (w *terminal) tmux(args ...string) string {
	w.t.Helper()
	out, err := exec.Command("tmux", append([]string{"-S", w.socket}, args...)...).CombinedOutput()
	if err != nil {
		w.t.Fatalf("tmux %q: %v: %s", args, err, out)
	}
	return string(out)
}

func (w *terminal) keys(keys ...string) { w.tmux(append([]string{"send-keys"}, keys...)...) }

// shows waits until the screen is as wanted, and returns it.
func (w *terminal) shows(what string, want func(screen string) bool) string {
	w.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		screen := w.tmux("capture-pane", "-p")
		if want(screen) {
			return screen
		}
		if time.Now().After(end) {
			w.t.Fatalf("it never shows %s:\n%s", what, screen)
		}
	}
}

func (w *terminal) has(texts ...string) string {
	w.t.Helper()
	return w.shows(fmt.Sprintf("%q", texts), func(screen string) bool {
		return !slices.ContainsFunc(texts, func(s string) bool {
			return !strings.Contains(screen, s)
		})
	})
}

// chosen returns the endpoint whose details a screen has.
func chosen(screen string) string {
	_, rest, _ := strings.Cut(screen, "\n\n")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}

func TestTopInTerminal(t *testing.T) {
	one, two := serveProcess(t), serveProcess(t)
	storePages(t, one, 10)
	first, second := one, two
	if second.dir < first.dir {
		first, second = second, first
	}
	w := newTerminal(t, 140, 40, binary+" top --every 100ms; echo ended with $?; stty -a; read x")
	w.has("lookaside top", one.dir, two.dir, "q quit")
	// Other tests' sidecars may be there: the ones of this test are found by moving.
	choose := func(dir, key string) {
		t.Helper()
		w.shows(dir+" chosen", func(screen string) bool {
			if chosen(screen) == dir {
				return true
			}
			w.keys(key)
			return false
		})
	}
	for range 100 {
		w.keys("Up")
	}
	choose(first.dir, "Down")
	choose(second.dir, "j")
	choose(one.dir, map[bool]string{true: "k", false: "j"}[one == first])
	w.has("10 pages", "engine", "worker")
	w.keys("?")
	w.has("PgUp/PgDn scroll")
	w.keys("Space")
	w.has("paused at")
	w.keys("r")
	w.shows("that it goes on", func(s string) bool { return !strings.Contains(s, "paused") })
	// Smaller: nothing wraps, and the keys stay on the screen.
	w.tmux("resize-window", "-x", "60", "-y", "20")
	screen := w.shows("a smaller screen", func(s string) bool {
		lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
		return len(lines) == 20 && strings.HasPrefix(lines[0], "lookaside top") &&
			strings.Contains(lines[19], "up/down choose") && strings.Contains(s, "…")
	})
	if strings.Count(screen, "HOW IT IS") > 1 {
		t.Errorf("it is there twice:\n%s", screen)
	}
	// One that is killed leaves the list, and the others stay.
	w.tmux("resize-window", "-x", "140", "-y", "40")
	two.signal(syscall.SIGKILL)
	two.exit(patience)
	w.shows("that one is gone", func(s string) bool {
		return strings.Contains(s, one.dir) && !strings.Contains(s, two.dir)
	})
	w.keys("q")
	screen = w.has("ended with 0", "icanon")
	for _, left := range []string{"-icanon", "-echo ", "HOW IT IS"} {
		if strings.Contains(screen, left) {
			t.Errorf("the terminal is not as before: %s\n%s", left, screen)
		}
	}
}

func TestTopEndsOnInterrupt(t *testing.T) {
	w := newTerminal(t, 80, 24, binary+" top; echo ended with $?; read x")
	w.has("lookaside top", "q quit")
	w.keys("C-c")
	w.has("ended with 0")
}

func TestTopOnce(t *testing.T) {
	s := serveProcess(t)
	storePages(t, s, 10)
	ses, err := client.Dial(s.dir, hello(wire.RoleScheduler), patience)
	if err != nil {
		t.Fatal(err)
	}
	defer ses.Close()
	lookups, err := ses.Lookups()
	if err != nil {
		t.Fatal(err)
	}
	defer lookups.Close()
	packed, _ := hashes(12)
	if _, err := lookups.Lookup(&wire.Lookup{Session: ses.Welcome.Session,
		Secret: ses.Welcome.Secret, Lookup: 1, Hashes: packed, Tenant: wire.Label("blue")},
		patience); err != nil {
		t.Fatal(err)
	}
	out, stderr, code := run(t, nil, "top", "--json")
	var all []admin.HostState
	if err := json.Unmarshal([]byte(out), &all); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v: %s%s", code, err, out, stderr)
	}
	i := slices.IndexFunc(all, func(h admin.HostState) bool { return h.Endpoint == s.dir })
	if i < 0 || all[i].Status == nil || all[i].Status.Pages != 10 ||
		all[i].PID != s.cmd.Process.Pid {
		t.Errorf("%+v", all)
	}
	// Without a terminal the same comes as text.
	out, stderr, code = run(t, nil, "top")
	if code != 0 || strings.ContainsAny(out, "\x1b\r") {
		t.Errorf("exit code %d: %s%s", code, out, stderr)
	}
	for _, want := range []string{`10 pages`, `(?m)^never_stored +1 +2 +new prompts are computed once`,
		`(?m)^TENANT `, `(?m)^blue +192 +160 +83\.3 % `} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
	if _, stderr, code := run(t, nil, "top", "--every=1ms"); code != 1 ||
		!strings.Contains(stderr, "100ms or more") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}
