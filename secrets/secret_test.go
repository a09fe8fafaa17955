package secrets

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

const canary = "c4nary-pa55word"

// leaks lists the forms of the canary that are found in text.
func leaks(text string) []string {
	var found []string
	for _, form := range []string{
		canary,
		base64.RawStdEncoding.EncodeToString([]byte(canary)),
		base64.RawStdEncoding.EncodeToString([]byte("u:" + canary)),
		hex.EncodeToString([]byte(canary)),
		strings.Trim(fmt.Sprint([]byte(canary)), "[]"),
	} {
		if strings.Contains(strings.ToLower(text), strings.ToLower(form)) {
			found = append(found, form)
		}
	}
	return found
}

func TestNoWayOfPrintingShowsAPassword(t *testing.T) {
	entries, _ := parseDockerConfigJSON([]byte(`{"auths":{"r.io":{"username":"u","password":"` + canary + `"}}}`))
	keyring := newKeyring(entries)
	credential := keyring.Lookup("r.io/x")[0]
	if credential.Password.Reveal() != canary {
		t.Fatal("the canary is not in the keyring")
	}
	values := map[string]any{
		"Secret": credential.Password, "*Secret": &credential.Password,
		"Credential": credential, "*Credential": &credential, "[]Credential": []Credential{credential},
		"Keyring": *keyring, "*Keyring": keyring,
		"a struct of another package": struct{ hidden Credential }{credential},
		"an error":                    fmt.Errorf("pull failed with %v", credential),
	}
	for name, value := range values {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "% x", "%d", "%b", "%o", "%c", "%U", "%t", "%e", "%p", "%T", "%20v", "%w", "%!"} {
			if found := leaks(fmt.Sprintf(verb, value)); found != nil {
				t.Errorf("%s printed with %s shows %q", name, verb, found)
			}
		}
		encoded, err := json.Marshal(value)
		if err != nil || leaks(string(encoded)) != nil {
			t.Errorf("%s as JSON: %s, %v", name, encoded, err)
		}
		var log bytes.Buffer
		slog.New(slog.NewTextHandler(&log, nil)).Info("m", "value", value)
		slog.New(slog.NewJSONHandler(&log, nil)).Info("m", "value", value)
		if found := leaks(log.String()); found != nil {
			t.Errorf("%s in slog shows %q", name, found)
		}
	}
	encoded, err := xml.Marshal(credential)
	if err != nil || leaks(string(encoded)) != nil {
		t.Errorf("Credential as XML: %s, %v", encoded, err)
	}
}

func TestASecretPrintsAsRedactedEverywhere(t *testing.T) {
	for _, secret := range []Secret{NewSecret(canary), {}} {
		text, _ := secret.MarshalText()
		inJSON, _ := json.Marshal(secret)
		for form, got := range map[string]string{
			"String": secret.String(), "GoString": secret.GoString(), "%v": fmt.Sprint(secret), "%x": fmt.Sprintf("%x", secret),
			"MarshalText": string(text), "JSON": strings.Trim(string(inJSON), `"`), "LogValue": secret.LogValue().String(),
		} {
			if got != "[redacted]" {
				t.Errorf("%s gives %q", form, got)
			}
		}
	}
}

func TestSecretsAreEqualWhenTheirValuesAre(t *testing.T) {
	a, sameAsA := NewSecret("a"), NewSecret(strings.Clone("a"))
	if a != sameAsA || a == NewSecret("b") || NewSecret("") != (Secret{}) {
		t.Error("== does not compare values")
	}
	if got := (Secret{}).Reveal(); got != "" {
		t.Errorf("the zero Secret reveals %q", got)
	}
	if got := NewSecret("p\x00\n").Reveal(); got != "p\x00\n" {
		t.Errorf("bytes changed: %q", got)
	}
}

func TestNameIsSourceAndKey(t *testing.T) {
	got := Credential{Source: "harbor", Key: "https://harbor.example.com"}.Name()
	if want := "harbor/https://harbor.example.com"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAKeyIsShownWithoutWhatMayBeAPassword(t *testing.T) {
	for key, want := range map[string]string{
		"https://index.docker.io/v1/":   "https://index.docker.io/v1/",
		"r.io:5000/team":                "r.io:5000/team",
		"app?.foo.bar":                  "app?.foo.bar",
		"https://u:" + canary + "@r":    "https://[redacted]@r",
		"u:" + canary + "@r.io/team":    "[redacted]@r.io/team",
		"http://u:a/b?" + canary + "@r": "http://[redacted]@r",
		"u:a@" + canary + "@r.io":       "[redacted]@r.io",
		"r.io/x?token=" + canary:        "r.io/x?[redacted]",
		"u:" + canary + "@r.io?a=b":     "[redacted]@r.io?[redacted]",
	} {
		if got := displayKey(key); got != want {
			t.Errorf("displayKey(%q) = %q, want %q", key, got, want)
		}
	}
}
