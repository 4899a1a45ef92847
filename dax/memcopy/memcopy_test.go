//go:build linux

package memcopy

import (
	"testing"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
