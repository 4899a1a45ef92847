package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/internal/prefixes"
	"lookaside/sidecar/admin"
)

// userManager runs a service manager of its own, with the example's unit. It is systemd's manager
// of a user, because systemd may not have booted the machine that the test runs on.
type userManager struct {
	t   *testing.T
	dir string
}

// notOfUsers are settings that only the system's manager has, or that would keep the unit from this
// test's files.
var notOfUsers = regexp.MustCompile(`(?m)^(User|Group|RuntimeDirectory|StateDirectory|Protect|` +
	`PrivateTmp|PrivateMounts|Device|Environment|OOMScoreAdjust|LimitMEMLOCK|ExecStart)\w*=.*\n`)

func startManager(t *testing.T) *userManager {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: not root: a manager of its own needs a mount namespace")
	}
	program := "/lib/systemd/systemd"
	if _, err := os.Stat(program); err != nil {
		t.Skipf("SKIPPED: no systemd here: %v", err)
	}
	unit, err := os.ReadFile("../../../examples/systemd/lookaside@.service")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "la")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	m := &userManager{t: t, dir: dir}
	units := filepath.Join(dir, "config", "systemd", "user")
	if err := os.MkdirAll(units, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	// What the filters forbid is fatal here, and so not missed.
	command := fmt.Sprintf("[Service]\nExecStart=%s serve --runtime-dir %s/%%i "+
		"--arena-kind memfd --arena-limit 16M --arena-numa 0 --disk %s/disk:64M\n", binary, dir, dir)
	text := strings.Replace(notOfUsers.ReplaceAllString(string(unit), ""), "[Service]\n", command,
		1)
	text = strings.Replace(text, "SystemCallErrorNumber=EPERM\n", "", 1)
	if !strings.Contains(text, "\nSystemCallFilter=") {
		t.Fatalf("the unit does not filter system calls:\n%s", text)
	}
	if err := os.WriteFile(filepath.Join(units, "lookaside@.service"), []byte(text),
		0o600); err != nil {
		t.Fatal(err)
	}
	// The manager of a user wants to see that the system was booted by systemd. What other tests
	// unmount is unmounted here too (slave); their file systems would stay alive otherwise.
	cmd := exec.Command("unshare", "--mount", "--propagation", "slave", "sh", "-c",
		"mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && exec "+program+
			" --user --log-target=console")
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	said := func() string {
		b, _ := os.ReadFile(log.Name())
		return string(b)
	}
	cmd.Stdout, cmd.Stderr, cmd.Env = log, log, m.environ()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Skipf("SKIPPED: no mount namespace: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_, _ = m.systemctl("stop", "lookaside@*")
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(patience):
			_ = cmd.Process.Kill()
			<-ended
		}
	})
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if _, err := m.systemctl("show", "--property=Version"); err == nil {
			return m
		}
		select {
		case err := <-ended:
			ended <- err
			t.Skipf("SKIPPED: systemd does not run as a user's manager here: %v\n%s", err,
				said())
		default:
		}
		if time.Now().After(end) {
			t.Fatalf("the manager does not answer:\n%s", said())
		}
	}
}

func (m *userManager) environ() []string {
	return append(os.Environ(), "XDG_RUNTIME_DIR="+filepath.Join(m.dir, "run"),
		"XDG_CONFIG_HOME="+filepath.Join(m.dir, "config"), "DBUS_SESSION_BUS_ADDRESS=")
}

func (m *userManager) systemctl(args ...string) (string, error) {
	cmd := exec.Command("systemctl", append([]string{"--user"}, args...)...)
	cmd.Env = m.environ()
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (m *userManager) must(args ...string) string {
	m.t.Helper()
	out, err := m.systemctl(args...)
	if err != nil {
		m.t.Fatalf("systemctl %v: %v: %s", args, err, out)
	}
	return out
}

// status waits until the unit's process is another one than before, and its arena is ready.
func (m *userManager) status(before int) admin.Status {
	m.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		st, err := admin.FetchStatus(m.t.Context(), filepath.Join(m.dir, "one"))
		if err == nil && st.PID != before && st.Arena.State == "ready" {
			return st
		}
		if time.Now().After(end) {
			m.t.Fatalf("no status: %v, %+v\n%s", err, st.Arena, m.must("status", "lookaside@one"))
		}
	}
}

// systemd keeps the memory while no sidecar and no worker runs, as the example's unit asks it to.
func TestSystemdKeepsTheArena(t *testing.T) {
	m := startManager(t)
	m.must("start", "lookaside@one")
	st := m.status(0)
	process, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", st.PID))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"\nSeccomp:\t2\n", "\nNoNewPrivs:\t1\n",
		"\nCapBnd:\t0000000000000000\n"} {
		if !strings.Contains(string(process), want) {
			t.Errorf("the unit's process lacks %q:\n%s", want, process)
		}
	}
	dir := filepath.Join(m.dir, "one")
	shape := prefixes.Shape{PageBytes: 4096, PagesPerChunk: 4}
	p, err := prefixes.Dial(dir, shape, 1, 40)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Store(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if st = m.status(0); st.Arena.KeptChunks == 10 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%+v", st.Arena)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	for _, restart := range []struct {
		name string
		do   func()
	}{
		{"killed", func() { _ = syscall.Kill(st.PID, syscall.SIGKILL) }},
		{"systemctl restart", func() { m.must("restart", "lookaside@one") }},
	} {
		generation := st.Generation
		restart.do()
		st = m.status(st.PID)
		if st.Arena.Recovered.Chunks != 10 || st.Arena.Recovered.Why != "" ||
			st.Generation == generation {
			t.Fatalf("%s: %+v, generation %s after %s", restart.name, st.Arena, st.Generation,
				generation)
		}
		if p, err = prefixes.Dial(dir, shape, 1, 40); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Lookup(); err != nil {
			t.Fatalf("%s: %v", restart.name, err)
		}
		if err := p.Verify(); err != nil {
			t.Fatalf("%s: %v", restart.name, err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// Without any holder it is gone, and that is said.
	m.must("stop", "lookaside@one")
	m.must("start", "lookaside@one")
	if st = m.status(st.PID); st.Arena.Recovered.Chunks != 0 || st.Arena.Recovered.Why == "" {
		t.Errorf("%+v", st.Arena.Recovered)
	}
}

// systemd finds no mistake in the example's files, and little that the unit leaves open.
func TestSystemdUnitIsVerified(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	examples, err := filepath.Abs("../../../examples/systemd")
	if err != nil {
		t.Fatal(err)
	}
	unit, err := os.ReadFile(filepath.Join(examples, "lookaside@.service"))
	if err != nil {
		t.Fatal(err)
	}
	// The command must be there to be verified.
	path := filepath.Join(t.TempDir(), "lookaside@llama-0.service")
	text := strings.ReplaceAll(string(unit), "/usr/local/bin/lookaside", binary)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range [][]string{
		{"systemd-analyze", "verify", "--man=no", path},
		{"systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", path},
		{"systemd-sysusers", "--dry-run", filepath.Join(examples, "sysusers.conf")},
	} {
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		if err != nil || command[1] == "verify" && len(out) > 0 {
			t.Errorf("%v: %v\n%s", command, err, out)
		}
	}
	// What is misspelt is found.
	wrong := filepath.Join(filepath.Dir(path), "lookaside@wrong.service")
	if err := os.WriteFile(wrong, []byte(strings.Replace(text, "UMask=", "UMusk=", 1)),
		0o600); err != nil {
		t.Fatal(err)
	}
	if out, _ := exec.Command("systemd-analyze", "verify", "--man=no",
		wrong).CombinedOutput(); !strings.Contains(string(out), "UMusk") {
		t.Errorf("verify overlooks a misspelt setting: %s", out)
	}
}
