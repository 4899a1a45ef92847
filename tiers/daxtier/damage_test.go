package daxtier

import (
	"bufio"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// killed runs the test binary as a child with a variable of the environment that makes it one. It
// passes each line that the child prints to heard, which calls kill to have the child killed within
// some milliseconds, and returns when the child has ended. A line that begins with ! is an error.
func killed(t *testing.T, rnd *rand.Rand, env string, within int,
	heard func(line string, kill func())) {
	t.Helper()
	self, err := os.Executable()
	noError(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), env)
	out, err := cmd.StdoutPipe()
	noError(t, err)
	noError(t, cmd.Start())
	opened, killing := false, false
	kill := func() {
		if !killing {
			killing = true
			time.AfterFunc(time.Duration(1+rnd.IntN(within))*time.Millisecond,
				func() { _ = cmd.Process.Kill() })
		}
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "!") {
			t.Error(line)
			continue
		}
		opened = opened || line == "open"
		heard(line, kill)
	}
	if !opened {
		t.Fatal("the child did not open its devices")
	}
	_ = cmd.Wait()
}

// damages is how many kinds of damage there are.
const damages = 6

// damage damages the bytes of a device, by the kind of this round. It returns what was done, and
// the bytes, which may be fewer.
func damage(rnd *rand.Rand, round int, b []byte) (what string, damaged []byte) {
	const page = 4096
	at := func() int { return rnd.IntN(len(b)/page) * page }
	switch round % damages {
	case 0:
		what = "bits flipped"
		for range 1 + rnd.IntN(200) {
			b[rnd.IntN(len(b))] ^= 1 << rnd.IntN(8)
		}
	case 1:
		what = "pages swapped"
		for range 1 + rnd.IntN(200) {
			x, y := at(), at()
			for i := range page {
				b[x+i], b[y+i] = b[y+i], b[x+i]
			}
		}
	case 2:
		what = "pages misdirected"
		for range 1 + rnd.IntN(50) {
			x, y := at(), at()
			copy(b[x:x+page], b[y:y+page])
		}
	case 3:
		what = "directories garbled"
		for range 1 + rnd.IntN(200) {
			b[rnd.IntN(64<<10)] = byte(rnd.Uint32())
		}
	case 4:
		what = "one copy of the header garbled"
		for i := range page {
			b[i] = byte(rnd.Uint32())
		}
	case 5:
		what = "cut short"
		b = b[:max(at(), 512<<10)]
	}
	return what, b
}
