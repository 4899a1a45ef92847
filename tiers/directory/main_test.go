package directory

import (
	"testing"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
